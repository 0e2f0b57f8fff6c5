"""The application that the server runs: the page and its files, ``/api``, events, tiles, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from keepstep.core.errors import KeepstepError
from keepstep.core.incident import Incident
from keepstep.core.log_lines import one_line
from keepstep.report.verdict import render
from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.samples import SampleStore
from keepstep.view.web.access import Access
from keepstep.view.web.feed import Feed
from keepstep.view.web.gate import LOGIN, App, Gate
from keepstep.view.web.heat import Window
from keepstep.view.web.page_content import incidents_content
from keepstep.view.web.pipeline_bars import pipeline_content

STATIC = Path(__file__).parent / "static"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_MOST_LOGIN_BYTES = 2048
_LOGIN_S = 5.0
_MOST_LISTED = 200
_MOST_TEXT = 65_536
_MOST_WAITING = 16  # for a picture or a verdict
_encode = msgspec.json.Encoder().encode

Exposition = Callable[[RunSnapshot, SampleStore], bytes]


@dataclass(frozen=True, slots=True)
class Served:
    """What a server shows. ``folder``: the run's, where it is here; ``metrics``: None where nothing makes them."""

    feed: Feed
    access: Access
    folder: Path | None = None
    metrics: Exposition | None = None
    tls: ssl.SSLContext | None = None


def make_app(served: Served) -> App:
    """The application behind its gate."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        looking = asyncio.create_task(served.feed.run())
        try:
            yield
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking

    pages = _Pages(served)
    routes = [
        Route("/", pages.page),
        Route("/static/{name}", pages.static),
        Route(LOGIN, pages.login, methods=["POST"]),
        Route("/healthz", pages.health),
        Route("/favicon.ico", pages.icon),
        Route("/api", pages.state),
        Route("/api/incidents", pages.incidents),
        Route("/api/incidents/{number}", pages.incident),
        Route("/api/pipeline/{number}", pages.pipeline),
        Route("/api/tile", pages.tile),
        Route("/api/cell", pages.cell),
        Route("/api/events", pages.events),
        Route("/metrics", pages.metrics),
    ]
    handlers = {asyncio.TimeoutError: pages.unseen}
    return Gate(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), served.access)  # type: ignore[arg-type]


@cache
def _files() -> dict[str, tuple[bytes, bytes]]:
    """The static files by name, plain and gzipped."""
    known = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _KINDS}
    return {name: (content, gzip.compress(content, 9, mtime=0)) for name, content in known.items()}


class _Turns(asyncio.Lock):
    """A lock for which few wait: whoever has gone meanwhile would be waited for, too."""

    waiting = 0

    async def __aenter__(self) -> None:
        if self.waiting >= _MOST_WAITING:
            raise HTTPException(503, "too many ask for this at once; ask again", {"retry-after": "5"})
        self.waiting += 1
        try:
            await self.acquire()
        finally:
            self.waiting -= 1


class _Pages:
    """What each address gives."""

    def __init__(self, served: Served) -> None:
        self._served, self._feed = served, served.feed
        self._exposed: tuple[int, bytes] | None = None
        self._expose = asyncio.Lock()
        self._draws = _Turns()  # one at a time: reading rings takes a core for a while

    async def page(self, request: Request) -> Response:
        return _packed(request, _files().get("index.html"), _KINDS[".html"])

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        return _packed(request, _files().get(name), _KINDS.get(Path(name).suffix, "text/plain"))

    async def icon(self, request: Request) -> Response:
        return _packed(request, _files().get("icon.svg"), _KINDS[".svg"])

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def unseen(self, request: Request, error: Exception) -> Response:
        return PlainTextResponse("the run could not be looked at; the server's output says why\n", 503)

    async def login(self, request: Request) -> Response:
        """Change the token in the body for a cookie."""
        access = self._served.access
        if access.token is None:
            return PlainTextResponse("no token is needed\n")
        try:
            shown = await asyncio.wait_for(_body(request, _MOST_LOGIN_BYTES), _LOGIN_S)
        except (asyncio.TimeoutError, ClientDisconnect):
            return PlainTextResponse("the token did not come\n", 408)
        if shown is None or not access.is_token(shown):
            return PlainTextResponse("this is not the token of this server\n", 403)
        answer = PlainTextResponse("welcome\n")
        answer.set_cookie(
            access.cookie_name,
            access.cookie,
            httponly=True,
            samesite="strict",
            secure=self._served.tls is not None,
            path="/",
        )
        return answer

    async def state(self, request: Request) -> Response:
        moment = await self._feed.newest()
        return _packed(request, (moment.whole, moment.whole_gzipped), "application/json")

    async def incidents(self, request: Request) -> Response:
        """Incidents before a number, newest last, at most so many."""
        before, most = _number(request, "before", 1 << 40), _number(request, "most", 100)
        incidents = (await self._feed.newest()).snapshot.incidents
        older = [one for one in incidents if one.number < before]
        older = older[max(len(older) - min(most, _MOST_LISTED), 0) :]
        content = await asyncio.to_thread(
            lambda: _encode({"count": len(incidents), "incidents": incidents_content(older)})
        )
        return _packed(request, (content, None), "application/json")

    async def incident(self, request: Request) -> Response:
        """One incident, with its verdict as text."""
        snapshot = (await self._feed.newest()).snapshot
        one = _incident_of(request, snapshot)
        if one is None:
            return PlainTextResponse("there is no such incident\n", 404)
        async with self._draws:
            text = await asyncio.to_thread(_verdict, one, snapshot)
        return JSONResponse({**incidents_content([one])[0], "verdict": text[:_MOST_TEXT]})

    async def pipeline(self, request: Request) -> Response:
        """The Gantt of an incident's pipeline."""
        snapshot = (await self._feed.newest()).snapshot
        one = _incident_of(request, snapshot)
        if one is None:
            return PlainTextResponse("there is no such incident\n", 404)
        async with self._draws:
            content = await asyncio.to_thread(pipeline_content, self._served.folder, one, snapshot.layout)
        return _packed(request, (_encode(content), None), "application/json")

    async def tile(self, request: Request) -> Response:
        """Cells of the heat map: `keepstep.view.web.heat` says how they are coded."""
        heat = (await self._feed.newest()).heat
        content = await asyncio.to_thread(heat.tile, _window(request))
        return _packed(request, (content, None), "application/octet-stream")

    async def cell(self, request: Request) -> Response:
        """The worst rank of one cell."""
        heat = (await self._feed.newest()).heat
        return JSONResponse(await asyncio.to_thread(heat.cell, _window(request)))

    async def events(self, request: Request) -> Response:
        """What changes from now on, or from the moment that the viewer has, as server-sent events."""
        seen = _number(request, "seen", -1)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        frames = self._feed.frames(seen)
        return StreamingResponse(frames, media_type="text/event-stream", headers=headers)

    async def metrics(self, request: Request) -> Response:
        """What Prometheus scrapes."""
        exposition = self._served.metrics
        if exposition is None:
            return PlainTextResponse("metrics are not installed\n", 404)
        moment = await self._feed.newest(lingers=False)
        async with self._expose:
            if self._exposed is None or self._exposed[0] != moment.version:
                self._exposed = moment.version, await asyncio.to_thread(moment.heat.with_store, exposition)
        return _packed(request, (self._exposed[1], None), "text/plain; version=0.0.4; charset=utf-8")


def _incident_of(request: Request, snapshot: RunSnapshot) -> Incident | None:
    number = _whole(request.path_params["number"], -1)
    return next((one for one in snapshot.incidents if one.number == number), None)


def _verdict(incident: Incident, snapshot: RunSnapshot) -> str:
    """Takes seconds where there are very many victims."""
    try:
        return render(incident, run=snapshot.name, timeline=True, now_unix_s=snapshot.unix_s)
    except KeepstepError as error:
        return one_line(str(error))


def _window(request: Request) -> Window:
    return Window(
        mode="peers" if request.query_params.get("mode") == "peers" else "own",
        row0=_number(request, "row0", 0),
        row1=_number(request, "row1", 1 << 30),
        column0=_number(request, "column0", 0),
        column1=_number(request, "column1", 1 << 30),
        most_rows=_number(request, "rows", 256),
        most_columns=_number(request, "columns", 256),
    )


def _number(request: Request, name: str, default: int) -> int:
    return _whole(request.query_params.get(name, ""), default)


def _whole(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 13 else default


async def _body(request: Request, most: int) -> bytes | None:
    """The body, None where it is longer than it may be."""
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > most:
            return None
    return content


def _packed(request: Request, found: tuple[bytes, bytes | None] | None, kind: str) -> Response:
    """A response, gzipped where the viewer takes that."""
    if found is None:
        return PlainTextResponse("there is no such file\n", 404)
    plain, packed = found
    headers: dict[str, str] = {"vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", "") and len(plain) > 512:
        plain = packed if packed is not None else gzip.compress(plain, 3, mtime=0)
        headers["content-encoding"] = "gzip"
    kind = f"{kind}; charset=utf-8" if kind.startswith("text/") and "charset" not in kind else kind
    return Response(plain, media_type=kind, headers=headers)


def metrics_of_this_install() -> Exposition | None:
    """What makes the metrics of one run; None without ``prometheus-client``."""
    try:
        from keepstep.view.metrics import SeriesMemory, exposition
    except ImportError:
        return None
    memory = SeriesMemory()
    return lambda snapshot, samples: exposition(snapshot, samples, memory)
