"""``keepstep serve``: the page of a run, its metrics and its data, from a server that only looks."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.cli._parsing import Parser
from keepstep.core.errors import UsageError
from keepstep.core.log_lines import one_line
from keepstep.view.source import RunSource, open_source

if TYPE_CHECKING:
    import socket
    import ssl

    from keepstep.view.web.access import Access

_ABOUT = (
    "Show a run as a page, live or after its end, with its metrics for Prometheus under /metrics. The server only "
    "looks: nothing that is done on the page reaches the job."
)


def main(argv: Sequence[str]) -> int:
    """Serve until a signal comes."""
    parser = Parser("serve", _ABOUT)
    parser.add_run()
    text = "where to listen; an address that others reach needs a token and TLS (default: 127.0.0.1:8642)"
    parser.add_argument("--listen", default="127.0.0.1:8642", metavar="HOST:PORT", help=text)
    text = "file of mode 0600 with the token that viewers have to show"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=text)
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain of the server, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM, not encrypted")
    text = "a further name by which browsers call this server; may be given again"
    parser.add_argument("--name", action="append", default=[], metavar="HOST", help=text)
    given = parser.parse(argv)
    try:
        import starlette  # noqa: F401 - whether the extra is installed
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"serve: {error.name} is not installed; `pip install keepstep[web]` brings what the page needs"
        ) from error
    from keepstep.view.web.access import Access, names_of, read_token
    from keepstep.view.web.serving import (
        Address,
        bound_socket,
        check_address,
        is_loopback,
        tls_context,
        url_of,
    )

    if (given.tls_cert is None) != (given.tls_key is None):
        raise UsageError("serve: --tls-cert and --tls-key belong together; give both or none")
    address = Address.read(given.listen)
    check_address(address, has_token=given.token_file is not None, has_tls=given.tls_cert is not None)
    token = read_token(given.token_file) if given.token_file is not None else None
    tls = tls_context(given.tls_cert, given.tls_key) if given.tls_cert is not None else None
    with contextlib.closing(open_source(given.run)) as source:
        source.refresh()  # what is wrong with the run is said before the page is there
        with bound_socket(address) as bound:
            access = Access(
                token,
                names_of(address.host, given.name),
                only_loopback=is_loopback(address.host),
                cookie_name=f"keepstep-{bound.getsockname()[1]}",
            )
            url = url_of(address, bound, tls=tls is not None)
            print(f"keepstep: {one_line(given.run)} at {url} (Ctrl-C ends it)", file=sys.stderr, flush=True)
            if token is not None:
                how = f"open {url}#TOKEN, TOKEN being what is in {given.token_file}"
                print(f"keepstep: {one_line(how)}", file=sys.stderr, flush=True)
            asyncio.run(_serve(source, given.run, access, bound, tls))
    return 0


async def _serve(
    source: RunSource, run: str, access: Access, bound: socket.socket, tls: ssl.SSLContext | None
) -> None:
    from keepstep.view.web.app import Served, make_app, metrics_of_this_install
    from keepstep.view.web.feed import Feed
    from keepstep.view.web.serving import WebServer

    folder = next((one for one in (Path(run), Path("runs") / run) if (one / "run.json").is_file()), None)
    feed = Feed(source, run)
    served = Served(feed, access, folder, metrics_of_this_install(), tls=tls is not None)
    server = WebServer(make_app(served), tls=tls, closing=feed.close)
    with server.quiet():
        await server.serve([bound])
