"""The socket: one that is taken, limits of requests and connections, clients that say or read nothing."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from pathlib import Path

import pytest
from tests.certificates import certificates
from tests.unit.view.web.served_run import MadeRun, serving

from keepstep.core.errors import RunError
from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.web.feed import Feed
from keepstep.view.web.serving import Address, bound_socket, tls_context


def test_a_port_in_use_is_one_line_that_says_what_to_do() -> None:
    with bound_socket(Address("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=r"the port is in use.*--listen HOST:PORT"):
            bound_socket(Address("127.0.0.1", port))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(RunError, match="name an address of this machine"):
        bound_socket(Address("192.0.2.1", 0))


def test_two_servers_show_one_run() -> None:
    with serving(MadeRun()) as one, serving(MadeRun()) as other:
        assert one.port != other.port
        assert one.ask("/api")[0] == other.ask("/api")[0] == 200


def ended(line: socket.socket) -> bool:
    """Whether the server closes the connection without an answer of more than a refusal."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := line.recv(4096):
            received += part
    return not received or received.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("sent", [b"", b"GET /api HTTP/1.1\r\nHost: local"])
def test_who_does_not_finish_a_request_is_let_go(sent: bytes) -> None:
    with serving(request_s=0.05) as viewer, viewer.raw() as line:
        line.sendall(sent)
        assert ended(line)
        assert viewer.ask("/healthz")[0] == 200


def test_a_byte_now_and_then_does_not_buy_time() -> None:
    with serving(request_s=0.2) as viewer, viewer.raw() as line:
        with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012 - which byte is the last is not known
            for _ in range(100_000):
                line.sendall(b"X")
                line.settimeout(0.01)
                try:
                    if not line.recv(1):
                        raise ConnectionResetError("reset")
                except TimeoutError:
                    pass
        assert viewer.ask("/healthz")[0] == 200


def test_a_second_request_has_to_come_whole_as_well() -> None:
    with serving(request_s=0.1) as viewer, viewer.raw() as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in line.recv(4096)
        line.sendall(b"GET /heal")
        try:
            while line.recv(4096):
                pass
        except ConnectionResetError:
            pass


def test_long_headers_are_refused() -> None:
    with serving() as viewer, viewer.raw() as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000)
        assert ended(line)
        assert viewer.ask("/healthz")[0] == 200


def test_connections_beyond_the_limit_are_closed() -> None:
    with serving(most_connections=3) as viewer:
        lines = [viewer.raw() for _ in range(3)]
        for line in lines:
            line.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in line.recv(4096)
        with viewer.raw() as more:
            assert ended(more)
        lines.pop().close()
        for line in lines:
            line.close()


def test_who_does_not_begin_tls_takes_no_more_room_than_others_and_is_let_go(tmp_path: Path) -> None:
    paths = certificates(tmp_path)
    context = tls_context(Path(paths.cert), Path(paths.key))
    with serving(tls=context, most_connections=3, request_s=0.5) as viewer, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(viewer.raw()) for _ in range(4)]
        began_s = time.monotonic()
        assert ended(silent.pop())
        assert all(map(ended, silent))
        assert time.monotonic() - began_s < 20  # asyncio waits a minute for a handshake


def test_who_reads_nothing_is_let_go_and_holds_up_nobody() -> None:
    run = MadeRun(steps=400, world=256)
    with serving(run, unread_s=0.2) as viewer, viewer.raw() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        # Pipelined requests whose answers nobody takes.
        line.sendall(b"GET /api/tile?columns=512 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 150)
        with contextlib.suppress(OSError):
            while True:
                viewer.ask("/healthz")
                line.sendall(b" ")
        assert viewer.ask("/healthz")[0] == 200


class Hurried(Feed):
    """Looks again at once."""

    @property
    def interval_s(self) -> float:
        return 0.01


class Stepping(MadeRun):
    """A run that has made a step whenever it is looked at."""

    def refresh(self) -> RunSnapshot:
        self.make_step()
        return super().refresh()


def frames_of(line: socket.socket, last: int) -> list[bytes]:
    """The events that come until that version has come."""
    received = b""
    while not (frames := received.partition(b"\r\n\r\n")[2]).count(b"id: %d\n" % last):
        received += line.recv(65536)
    return re.findall(rb"id: \d+\nevent: \w+\ndata: [^\n]*\n\n", frames)


def test_a_viewer_who_reads_nothing_keeps_no_other_one_waiting() -> None:
    asked = b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(Stepping(), feed=Hurried) as viewer, contextlib.ExitStack() as stack:
        slow, *others = [stack.enter_context(viewer.raw()) for _ in range(12)]
        for line in (slow, *others):
            line.sendall(asked)
        seen = [frames_of(line, 30) for line in others]
        assert all(len(frames) > 5 for frames in seen)
        # All got the very same changes, whenever they came.
        by_version: dict[bytes, set[bytes]] = {}
        for frame in (frame for frames in seen for frame in frames if b"event: change" in frame):
            by_version.setdefault(frame.partition(b"\n")[0], set()).add(frame)
        assert by_version
        assert {len(same) for same in by_version.values()} == {1}
