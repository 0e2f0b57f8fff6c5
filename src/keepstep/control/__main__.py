"""``python -m keepstep.control``: the controller as a program, started by the launcher of node 0."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

from keepstep import wire
from keepstep.control.server import ControlServer, Options
from keepstep.control.settings import Settings
from keepstep.core.budgets import limits_of
from keepstep.core.descriptors import raise_limit
from keepstep.core.errors import KeepstepError
from keepstep.core.log_lines import log_into
from keepstep.core.own_folders import make_folder

_PR_SET_PDEATHSIG = 1


def parse(argv: list[str]) -> Options:
    """The command line. Raises UsageError for addresses and TLS paths that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m keepstep.control", description="The controller of one run."
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's folder")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="this address and no other"
    )
    parser.add_argument("--secret-file", type=Path, required=True, help="the run's secret, mode 0600")
    parser.add_argument(
        "--run-id", default=wire.UNNAMED, metavar="ID", help="no program of another run is let in"
    )
    parser.add_argument("--nodes", type=int, default=1, help="launchers to wait for")
    parser.add_argument("--join-timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument(
        "--shrink-after",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for a spare where the job may go on with fewer nodes",
    )
    parser.add_argument(
        "--last-call", type=float, default=30.0, metavar="SECONDS", help="for more than the minimum"
    )
    parser.add_argument(
        "--halt-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for a launcher to end its workers",
    )
    parser.add_argument("--layout", default="", help="declared parallel layout, e.g. tp2-dp4-pp2")
    parser.add_argument(
        "--backups", type=int, default=0, metavar="K", help="nodes that back up each rank's checkpoints"
    )
    parser.add_argument("--restart-budget", default="", metavar="NAME=N,...", help="restarts within an hour")
    parser.add_argument("--no-validate", action="store_true", help="hold the job only when asked to")
    parser.add_argument(
        "--mitigate", choices=("off", "advise", "auto"), default="auto", help="slowdowns that last"
    )
    parser.add_argument(
        "--restart-hangs", action="store_true", help="have processes ended that hang for sure"
    )
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="of the job")
    parser.add_argument("--seat", type=int, default=0, metavar="TOKEN", help="of the launcher beside it")
    parser.add_argument("--term", type=int, default=0, metavar="N", help="in which that was elected")
    parser.add_argument("--council", type=Path, metavar="FILE", help="who elects, and the rank table")
    parser.add_argument("--tls-cert")
    parser.add_argument("--tls-key")
    parser.add_argument("--tls-ca")
    parser.add_argument(
        "--allow-translated-addresses",
        action="store_true",
        help="accept nodes whose addresses are rewritten on the way (NAT): weaker against relays",
    )
    parser.add_argument(
        "--no-parent", action="store_true", help="do not end with the process that started it"
    )
    arguments = parser.parse_args(argv)
    host, port = wire.parse_address(arguments.listen)
    settings = Settings(
        nodes=arguments.nodes,
        join_s=arguments.join_timeout,
        shrink_s=arguments.shrink_after,
        last_call_s=arguments.last_call,
        halt_s=arguments.halt_timeout,
        backups=max(0, arguments.backups),
        validate=not arguments.no_validate,
        mitigate=arguments.mitigate,
        restart_hangs=arguments.restart_hangs,
        max_restarts=max(0, arguments.max_restarts),
        restart_budget=limits_of(arguments.restart_budget),
        seat=arguments.seat,
        term=arguments.term,
    )
    return Options(
        run_dir=arguments.run_dir.resolve(),
        host=host,
        port=port,
        secret_file=arguments.secret_file,
        run_id=arguments.run_id,
        settings=settings,
        council=arguments.council,
        layout=arguments.layout,
        tls=wire.TlsPaths.of(arguments.tls_cert, arguments.tls_key, arguments.tls_ca),
        check_addresses=not arguments.allow_translated_addresses,
        watch_parent=not arguments.no_parent,
    )


def collect_rarely() -> None:
    """What is kept is bounded and without cycles: looking for them among 100,000 ranks would only cost time."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def main(argv: list[str]) -> int:
    """Runs until the job is over; 0 then and on SIGTERM, 2 when it cannot start."""
    parent = os.getppid()
    try:
        options = parse(argv)
        make_folder(options.run_dir)
        log_into(options.run_dir / "controller.log", "%(asctime)s %(levelname)s %(name)s: %(message)s")
        if options.watch_parent:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                return 0

        collect_rarely()
        raise_limit()

        async def serve() -> int:
            return await ControlServer(options, parent=parent).main()

        return wire.run(serve())
    except KeepstepError as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
