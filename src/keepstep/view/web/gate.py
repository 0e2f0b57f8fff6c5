"""What every request passes first: only reading, only by the server's name, only with the token; and safe headers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from keepstep.view.web.access import Access

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOGIN = "/login"
_OPEN_TO_ALL = ("/", "/healthz", "/favicon.ico", LOGIN)  # nothing of the run is in these
_STATIC = "/static/"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


class Gate:
    """Wraps an ASGI application. Pages and scripts are open to all; what they show of the run is not."""

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_safely(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = [(name, value) for name, value in message.get("headers", ()) if name != b"server"]
                if not any(name == b"cache-control" for name, _ in given):
                    given.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*given, *HEADERS]}
            await send(message)

        refused = self._refused(scope)
        if refused is None:
            return await self._app(scope, receive, send_safely)
        status, reason, more = refused
        body = f"{reason}\n".encode()
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            *more,
        ]
        await send_safely({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
        return None

    def _refused(self, scope: Scope) -> tuple[int, str, tuple[tuple[bytes, bytes], ...]] | None:
        """Status, reason and more headers of a request that is not answered."""
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key = name.decode("latin-1")
            if key in headers and key in ("host", "authorization"):
                return 400, f"more than one {key}", ()
            headers[key] = (
                f"{headers[key]}; {value.decode('latin-1')}" if key in headers else value.decode("latin-1")
            )
        path: str = scope["path"]
        if not self._access.is_called(headers.get("host", "")):
            return 421, "not a name of this server; `keepstep serve --name NAME` allows one", ()
        method = scope["method"]
        if path == LOGIN:
            if method != "POST":
                return 405, "POST the token here", ((b"allow", b"POST"),)
            if not _is_own_origin(headers):
                return 403, "only this page may log in", ()
        elif method not in ("GET", "HEAD"):
            return (
                405,
                "this server only shows; orders are given by `keepstep ctl`",
                ((b"allow", b"GET, HEAD"),),
            )
        is_open = path in _OPEN_TO_ALL or path.startswith(_STATIC)
        if not is_open and not self._access.lets_in(headers):
            how = "open the page with #TOKEN at the end of its address, or send Authorization: Bearer TOKEN"
            return 401, how, ((b"www-authenticate", b'Bearer realm="keepstep"'),)
        return None


def _is_own_origin(headers: dict[str, str]) -> bool:
    """Whether the request came from a page of this server, or from no browser."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
