"""``keepstep serve``: the page of a run, its metrics and its data, from a server that only looks; who is told of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.cli._parsing import Parser, reach_run
from keepstep.core.errors import UsageError
from keepstep.core.log_lines import one_line
from keepstep.traces import open_run
from keepstep.view.notify import starting
from keepstep.view.run_source import RunSource, open_source

if TYPE_CHECKING:
    import socket

    from keepstep.view.web.app import Served
    from keepstep.view.web.serving import Address

_ABOUT = (
    "Show a run as a page, live or after its end, with its metrics for Prometheus under /metrics. The server only "
    "looks: nothing that is done on the page reaches the job."
)
_END_S = 15.0  # after which the process ends, whatever it waits for


def main(argv: Sequence[str]) -> int:
    """Serve until a signal comes."""
    given = _given(argv)
    reach_run(given.run)
    if given.notify_test:
        return _test(given)
    if given.no_page:
        return _only_tell(given)
    for name in ("starlette", "uvicorn"):
        try:
            import_module(name)
        except ImportError as error:  # noqa: PERF203 - the first one that is missing is named
            raise UsageError(
                f"serve: {name} is not installed; `pip install keepstep[web]` brings what the page needs"
            ) from error
    with contextlib.closing(open_source(given.run)) as source:
        source.refresh()  # what is wrong with the run is said before the page is there
        return _listen(given, source)


def _stop(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)  # not at once: who is told is let go on the way out


def _given(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("serve", _ABOUT)
    parser.add_run(elsewhere=True)
    text = "where to listen; an address that others reach needs a token and TLS (default: 127.0.0.1:8642)"
    parser.add_argument("--listen", default="127.0.0.1:8642", metavar="HOST:PORT", help=text)
    text = "file of mode 0600 with the token that viewers have to show"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=text)
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain of the server, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM, not encrypted")
    text = "a further name by which browsers call this server; may be given again"
    parser.add_argument("--name", action="append", default=[], metavar="HOST", help=text)
    starting.add_arguments(parser)
    given = parser.parse(argv)
    if (given.tls_cert is None) != (given.tls_key is None):
        raise UsageError("serve: --tls-cert and --tls-key belong together; give both or none")
    if (given.notify_test or given.no_page) and given.notify is None:
        flag = "--notify-test" if given.notify_test else "--no-page"
        raise UsageError(f"serve: {flag} needs --notify FILE, which names who is told")
    return given


def _test(given: argparse.Namespace) -> int:
    """Send a test message to all receivers; 1 where one did not get it."""
    with contextlib.closing(open_source(given.run)) as source:
        results = starting.test(given.notify, source.refresh(), os.environ)
    for name, why in results:
        print(one_line(f"{name}: {why or 'arrived'}"))
    return int(any(why for _, why in results))


def _only_tell(given: argparse.Namespace) -> int:
    """Tell of the run until its job has ended."""
    signal.signal(signal.SIGTERM, _stop)
    with contextlib.closing(open_source(given.run)) as source:
        source.refresh()  # what is wrong with the run is said before anybody is told
        telling = starting.start(given.notify, given.run, open_run(given.run).path, os.environ)
        with contextlib.closing(telling):
            starting.tell_until_end(source, telling)
    return 0


def _listen(given: argparse.Namespace, source: RunSource) -> int:
    from keepstep.view.web.access import Access, names_of, read_token
    from keepstep.view.web.app import Served, metrics_of_this_install
    from keepstep.view.web.feed import Feed
    from keepstep.view.web.serving import Address, bound_socket, check_address, is_loopback, tls_context

    address = Address.read(given.listen)
    check_address(address, has_token=given.token_file is not None, has_tls=given.tls_cert is not None)
    token = read_token(given.token_file) if given.token_file is not None else None
    tls = tls_context(given.tls_cert, given.tls_key) if given.tls_cert is not None else None
    folder = open_run(given.run).path
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(bound_socket(address))
        access = Access(
            token,
            names_of(address.host, given.name),
            only_loopback=is_loopback(address.host),
            cookie_name=f"keepstep-{bound.getsockname()[1]}",
        )
        on_snapshot = ()
        if given.notify is not None:
            telling = starting.start(given.notify, given.run, folder, os.environ)
            stack.callback(telling.close)
            on_snapshot = (telling,)
        feed = Feed(source, given.run, on_snapshot=on_snapshot, always=bool(on_snapshot))
        served = Served(feed, access, folder, metrics_of_this_install(), tls)
        signal.signal(signal.SIGTERM, _stop)
        _say_where(given, address, bound, served)
        asyncio.run(_serve(served, bound))
    return 0


def _say_where(given: argparse.Namespace, address: Address, bound: socket.socket, served: Served) -> None:
    from keepstep.view.web.serving import url_of

    url = url_of(address, bound, tls=served.tls is not None)
    lines = [f"{given.run} at {url} (Ctrl-C ends it)"]
    if given.token_file is not None:
        lines.append(f"open {url}#TOKEN, TOKEN being what is in {given.token_file}")
    for line in lines:
        print(f"keepstep: {one_line(line)}", file=sys.stderr, flush=True)


async def _serve(served: Served, bound: socket.socket) -> None:
    from keepstep.view.web.app import make_app
    from keepstep.view.web.serving import WebServer

    server = WebServer(make_app(served), tls=served.tls, closing=served.feed.close)
    with server.quiet():
        try:
            await server.serve([bound])
        finally:  # a thread that a file system holds up would be waited for
            timer = threading.Timer(_END_S, os._exit, (128 + signal.SIGTERM,))
            timer.daemon = True
            timer.start()
