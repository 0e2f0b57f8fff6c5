"""Real servers on this host that take notices, or do what servers do on bad days."""

from __future__ import annotations

import socket
import socketserver
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """What was posted."""

    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Web:
    """A web server: answers one request after the other as it was told to, then always as the last.

    An answer is a status, a status with headers and a body, or ``hang``, ``close``, ``reset``, ``drip``, ``junk``.
    """

    answers: list[str]
    requests: list[Request] = field(default_factory=list)
    port: int = 0
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/T000/B000/s3cr3t-of-the-path"


@contextmanager
def web(*answers: str, tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    """A web server for the block."""
    state, stopping = Web(list(answers) or ["200"]), threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            sock: socket.socket = self.request
            with suppress(OSError):
                answer(sock if tls is None else tls.wrap_socket(sock, server_side=True), state, stopping)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            return

    with Server(("127.0.0.1", 0), Handler) as server:
        state.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield state
        finally:
            stopping.set()
            server.shutdown()
            thread.join()


def answer(sock: socket.socket, state: Web, stopping: threading.Event) -> None:
    state.connections += 1
    number = min(state.connections, len(state.answers)) - 1
    how = state.answers[number]
    if how == "close":
        sock.close()
        return
    state.requests.append(request_from(sock))
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == "hang":
        stopping.wait(60)
    elif how == "drip":
        for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 5000:
            if stopping.is_set():
                break
            sock.sendall(bytes([byte]))
            time.sleep(0.02)
    elif how == "junk":
        sock.sendall(b"\x00\x01 this is no HTTP\r\n\r\n")
    else:
        head, _, body = how.partition("\n\n")
        status, *headers = head.split("\n")
        lines = [
            f"HTTP/1.1 {status} .",
            *headers,
            f"Content-Length: {len(body)}",
            "Connection: close",
            "",
            body,
        ]
        sock.sendall("\r\n".join(lines).encode())
    sock.close()


def request_from(sock: socket.socket) -> Request:
    with sock.makefile("rb") as file:
        target = file.readline().split()[1].decode()
        headers: dict[str, str] = {}
        while line := file.readline().decode().rstrip("\r\n"):
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return Request(target, headers, file.read(int(headers.get("content-length", "0"))))


@contextmanager
def refused_port() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
