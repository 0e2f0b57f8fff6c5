"""A server between an API server and its clients: it passes everything on, and can answer with faults instead.

It ends TLS with the API server's own certificate. Users keep their tokens, so that what they may do stays as it is.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from keepstep.wire import TlsPaths

_REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}
_TIMEOUT_S = 90.0
_DROPPED = {"host", "connection", "accept-encoding", "transfer-encoding", "content-length"}


class FaultyApi:
    """What listens at ``address``. ``seen``: requests so far, as method, path and the code of the answer."""

    def __init__(self, upstream: str, address: str, tls: TlsPaths) -> None:
        self.upstream, self.tls = urlsplit(upstream).netloc, tls
        self.seen: list[tuple[str, str, int]] = []
        self.watches = 0  # that go on now
        self._refusals: list[tuple[str, re.Pattern[str], int]] = []
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._ending, self._expired = 0, False
        faulty = self

        class Handler(_Handler):
            api = faulty

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert, tls.key)
        self._context = context
        self.server = f"https://{address}:{self._server.server_address[1]}"
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def refuse(self, method: str, path: str, code: int, times: int = 1) -> None:
        """Answer the next requests whose path a pattern fits with a code, and pass none of them on."""
        with self._lock:
            self._refusals += [(method, re.compile(path), code)] * times

    def forgive(self) -> None:
        """Refuse nothing that was not refused by now."""
        with self._lock:
            self._refusals.clear()

    def end_watches(self, *, expired: bool = False) -> int:
        """Cut all watches, or first tell them that their version is too old; how many there were."""
        with self._lock:
            self._ending += 1
            self._expired = expired
            return self.watches

    def refusal(self, method: str, path: str) -> int:
        """The code to refuse a request with; 0: pass it on."""
        with self._lock:
            for one in self._refusals:
                if one[0] == method and one[1].search(path):
                    self._refusals.remove(one)
                    return one[2]
        return 0

    @property
    def pending(self) -> int:
        """Refusals that nobody has got yet."""
        return len(self._refusals)

    def connection(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=self.tls.ca)
        return http.client.HTTPSConnection(self.upstream, timeout=_TIMEOUT_S, context=context)

    def ending(self) -> tuple[int, bool]:
        """How often watches were ended, and whether they are to be told that they are too old."""
        return self._ending, self._expired

    def count_watch(self, by: int) -> None:
        with self._lock:
            self.watches += by


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: FaultyApi

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        code = self.api.refusal(self.command, self.path)
        if code:
            self._answer(code, status_of(code), "application/json")
            return
        with closing(self.api.connection()) as connection:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _DROPPED}
            try:
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException):
                self.close_connection = True  # as the API server is away, so is this
                return
            kind = answer.getheader("Content-Type", "application/json")
            if parse_qs(urlsplit(self.path).query).get("watch", ["false"])[0] in ("true", "1"):
                self._pass_watch(connection, answer, kind)
            else:
                self._answer(answer.status, answer.read(), kind)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _answer(self, code: int, body: bytes, kind: str) -> None:
        self.api.seen.append((self.command, self.path, code))
        with suppress(OSError):  # who asked has gone
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _pass_watch(
        self, connection: http.client.HTTPSConnection, answer: http.client.HTTPResponse, kind: str
    ) -> None:
        if answer.status != 200:
            self._answer(answer.status, answer.read(), kind)
            return
        self.api.seen.append((self.command, self.path, 200))
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()
        before, _ = self.api.ending()
        self.api.count_watch(1)
        over = threading.Event()
        threading.Thread(target=self._end_when_told, args=(connection, before, over), daemon=True).start()
        try:
            with suppress(OSError, ValueError, http.client.HTTPException, AttributeError):
                for line in answer:
                    self.wfile.write(line)
                    self.wfile.flush()
        finally:
            over.set()
            self.api.count_watch(-1)

    def _end_when_told(
        self, connection: http.client.HTTPSConnection, before: int, over: threading.Event
    ) -> None:
        while not over.wait(0.02):
            count, expired = self.api.ending()
            if count != before:
                if expired:
                    with suppress(OSError, ValueError):
                        told = {"type": "ERROR", "object": json.loads(status_of(410))}
                        self.wfile.write(json.dumps(told).encode() + b"\n")
                        self.wfile.flush()
                with suppress(OSError):
                    self.connection.shutdown(2)
                with suppress(OSError, AttributeError):
                    connection.sock.shutdown(2)
                return

    def log_message(self, *_: object) -> None:
        """Say nothing: the tests look at ``seen``."""


def status_of(code: int) -> bytes:
    """The object by which an API server refuses something."""
    reason = _REASONS.get(code, "Unknown")
    told = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code}
    return json.dumps({**told, "reason": reason, "message": f"refused by the test: {reason}"}).encode()
