"""Typed and authenticated messages between launcher, agent and controller.

This is the client's side, in an agent or launcher, on its event loop::

    from keepstep import wire

    client = wire.Client(
        wire.parse_address("10.0.0.1:29400"),
        wire.RunKey(wire.read_secret(file), run_id),  # refuses a file that others can read
        role="agent",                            # or "launcher"
        greet=lambda: [wire.Hello("agent", node, node_rank, os.getpid()), *groups_so_far, *findings_that_still_hold],
        message=on_message,                      # Welcome, ProfileRequest, StateRequest, SaveRings, Stop ...
        connected=lambda: ..., disconnected=lambda: ..., trouble=lambda error, attempt: ...,
        tls=wire.client_context(paths) if paths else None,
    )
    client.send(wire.Heartbeat(...))             # never blocks, never raises; queued (bounded) while unconnected
    await client.drained(1.0); await client.close()

``greet`` is called for each new connection and must return everything that a new controller process needs to hear:
Hello, then from a launcher Join (with ``node_rank`` once it is placed) and Ended if that has happened, from an agent
Groups and the findings that still hold. A message is delivered at most once per connection; repeating it is harmless.

The controller's side is ``serve``. ``wire.run(main())`` runs a coroutine on uvloop where it is installed.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false
from keepstep.core.tls_paths import TlsPaths
from keepstep.wire.address import parse_address
from keepstep.wire.channel import TO_CHECK, TO_ELECTOR, ClientChannel, Ends, Role, ServerChannel, encode
from keepstep.wire.client import Client, ClientLimits
from keepstep.wire.counters import Counters
from keepstep.wire.election import Answer, Ask, Leads, Where
from keepstep.wire.loops import run
from keepstep.wire.messages import *  # noqa: F403
from keepstep.wire.secret import MOST_NAME, UNNAMED, RunKey, read_secret, write_secret
from keepstep.wire.server import Connection, Server, ServerCallbacks, ServerLimits, serve
from keepstep.wire.tls import client_context, server_context
from keepstep.wire.violation import AnotherJob, Reason, Unproven, Violation, job_named
