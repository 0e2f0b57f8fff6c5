"""One controller process against 12,500 agents at one heartbeat a second: how much of a core does it take?

The controller is the shipped program in a process of its own, with authentication and sealed frames, over real TCP
connections on loopback; its cost is its process's CPU time. The agents are stand-ins: connections that do the real
handshake and send prepared heartbeats of 8 ranks, from one client process that uses the other core.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import msgspec
import psutil

from benchmarks._report import Line, Report, bench_arguments
from keepstep import wire
from keepstep.core.finding import Finding
from keepstep.core.summary import ClockSample, IterationSummary, OpInFlight

RANKS = 8
GOAL = "12,500 agents at 1 Hz on one core with under 60 % of it"
_CONNECT_AT_ONCE = 200
_STEP_S = 0.75


def heartbeat(node: int, sequence: int, now_s: float, samples: int) -> wire.Heartbeat:
    """A full-sized heartbeat: 8 ranks, one operation in flight, ``samples`` clock samples."""
    step = int(sequence / _STEP_S)
    first = node * RANKS
    ranks = tuple(
        wire.RankBeat(
            first + local,
            step,
            2,
            step * 412 + local,
            0.7453211,
            0.3012345,
            0.0123456,
            True,
            OpInFlight("dp_3_of_64", 1, -1, step * 14, now_s - 0.01) if local == 0 else None,
        )
        for local in range(RANKS)
    )
    clock = tuple(
        ClockSample("dp_3_of_64", 1, -1, step * 14 + index, first, now_s - 0.3, now_s - 0.29)
        for index in range(samples)
    )
    return wire.Heartbeat(node, sequence, now_s, ranks, clock)


def iterations(node: int) -> tuple[IterationSummary, ...]:
    """Four healthy and three slow iterations of one rank, without streams."""
    durations = [(97 + index, 0.7 if index < 3 else 1.1) for index in range(7)]
    return tuple(IterationSummary(node * RANKS, step, 0.0, d, d / 2, d / 2) for step, d in durations)


class StandIn(asyncio.Protocol):
    """An agent's connection without an agent behind it."""

    def __init__(self, node: int, key: wire.RunKey, ready: asyncio.Future[None]) -> None:
        self._node, self._key, self._ready = node, key, ready
        self.sequence = 0
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        here, there = (transport.get_extra_info(name) for name in ("sockname", "peername"))
        ends = wire.Ends(f"{here[0]}:{here[1]}", f"{there[0]}:{there[1]}")
        self.channel = wire.ClientChannel(self._key, "agent", ends)
        self.transport.write(self.channel.open())

    def data_received(self, data: bytes) -> None:
        messages, answer = self.channel.receive(data)
        if answer:
            self.transport.write(answer)
            self.send(wire.Hello("agent", f"gpu-{self._node:05d}", self._node, 1000 + self._node))
        for message in messages:
            if isinstance(message, wire.Welcome) and not self._ready.done():
                self._ready.set_result(None)
            elif isinstance(message, wire.ProfileRequest):
                self.send(wire.Profile(message.request, self._node, iterations(self._node)))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    def send(self, message: wire.Message) -> None:
        self.transport.write(self.channel.send(message))

    def beat(self, body: bytes) -> None:
        """One prepared heartbeat, sealed now."""
        self.transport.write(self.channel.send_encoded(body))


async def connect_all(agents: int, port: int, key: wire.RunKey) -> list[StandIn]:
    loop = asyncio.get_running_loop()
    stand_ins: list[StandIn] = []

    async def one(node: int) -> None:
        ready: asyncio.Future[None] = loop.create_future()
        _, protocol = await loop.create_connection(lambda: StandIn(node, key, ready), "127.0.0.1", port)
        stand_ins.append(protocol)
        await asyncio.wait_for(ready, 60)

    for first in range(0, agents, _CONNECT_AT_ONCE):
        await asyncio.gather(*(one(node) for node in range(first, min(first + _CONNECT_AT_ONCE, agents))))
    return stand_ins


async def beat_for(stand_ins: list[StandIn], bodies: list[bytes], seconds: float) -> tuple[int, float]:
    """Every stand-in once a second, spread evenly; returns how many were sent and how late the slowest slot was."""
    slots = 100
    began = time.monotonic()
    sent, latest = 0, 0.0
    for tick in range(int(seconds * slots)):
        due = began + tick / slots
        wait = due - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        else:
            latest = max(latest, -wait)
            await asyncio.sleep(0)
        for index in range(tick % slots, len(stand_ins), slots):
            stand_ins[index].beat(bodies[index])
            sent += 1
    return sent, latest


def start_controller(
    run: Path, secret: Path, nodes: int = 1, seat: int = 0
) -> tuple[subprocess.Popen[str], int]:
    """The shipped program, waiting for so many launchers; and its port. ``seat``: of the launcher beside it, if any."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "keepstep.control", "--run-dir", str(run)),
            *("--listen", "127.0.0.1:0", "--secret-file", str(secret), "--nodes", str(nodes)),
            *(("--seat", str(seat), "--term", "1", "--council", str(run / "council-1.json")) if seat else ()),
        ],
        stdout=subprocess.PIPE,
        stderr=(run / "stderr.txt").open("w"),
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["port"]


async def storm(stand_ins: list[StandIn], run: Path) -> float:
    """Every agent finds the same slowdown at once; seconds until the verdict is in the run's folder."""
    began = time.monotonic()
    for node, stand_in in enumerate(stand_ins):
        rank = node * RANKS
        finding = Finding(
            "slow", rank, f"gpu-{node:05d}", began, 103, onset_step=100, before_s=0.7, after_s=1.1
        )
        stand_in.send(wire.Found(finding))
    path = run / "incidents" / "0001.json"
    while not path.exists() and time.monotonic() - began < 60:
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def measure(agents: int, seconds: float, samples: int, report: Report, run: Path) -> None:
    key = wire.RunKey(wire.write_secret(run / "secret"))
    process, port = start_controller(run, run / "secret")
    watched = psutil.Process(process.pid)

    def cpu_s() -> float:
        times = watched.cpu_times()
        return times.user + times.system

    try:
        began, before = time.monotonic(), cpu_s()
        stand_ins = await connect_all(agents, port, key)
        handshakes, joined_s = cpu_s() - before, time.monotonic() - began
        now_s = time.monotonic()
        bodies = [wire.encode(heartbeat(node, 60, now_s, samples)) for node in range(agents)]
        await beat_for(stand_ins, bodies, 3)
        before, began = cpu_s(), time.monotonic()
        sent, late = await beat_for(stand_ins, bodies, seconds)
        used, took = cpu_s() - before, time.monotonic() - began
        size = len(bodies[0])
        share = 100 * used / took
        kept_up = sent / took > 0.97 * agents and not any(one.lost for one in stand_ins)
        before = cpu_s()
        latency = await storm(stand_ins, run)
        storm_cpu = cpu_s() - before
        memory = watched.memory_info().rss / 2**20
        for one in stand_ins:
            one.transport.abort()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    shape = (
        f"{agents} stand-in agents on loopback, {RANKS} ranks and {samples} clock samples each, {size} bytes"
    )
    limit = f"{shape}, {seconds:g} s; clients on the other core"
    met = share < 60 if agents >= 12_500 and kept_up else None
    report.add(Line("controller CPU, authenticated", round(share, 1), "% of a core", GOAL, met, limit=limit))
    report.add(Line("heartbeats", round(sent / took), "1/s", limit=f"slowest slot {late * 1e3:.0f} ms late"))
    per_beat = 1e6 * used / sent
    report.add(
        Line("CPU per heartbeat, authenticated", round(per_beat, 1), "µs", limit="status.json included")
    )
    report.add(
        Line("CPU per handshake", round(1e6 * handshakes / agents), "µs", limit=f"all in {joined_s:.1f} s")
    )
    report.add(
        Line(
            f"storm of {agents} findings to the verdict",
            round(latency, 2),
            "s",
            limit=f"profiles of 1 rank and 7 iterations from each agent; {storm_cpu:.2f} s CPU",
        )
    )
    report.add(Line("controller memory", round(memory), "MiB"))


def without_authentication(report: Report, samples: int) -> None:
    """What sealing adds: the same heartbeat opened with and without its code, in this process."""
    ends = (wire.Ends("a:1", "b:2"), wire.Ends("b:2", "a:1"))
    client = wire.ClientChannel(wire.RunKey(b"x" * 32), "agent", ends[0])
    server = wire.ServerChannel(wire.RunKey(b"x" * 32), ends[1])
    _, challenge = server.receive(client.open())
    _, proof = client.receive(challenge)
    server.receive(proof)
    count = 20_000
    message = heartbeat(7, 60, 1234.5, samples)
    frames = [client.send(message) for _ in range(count)]
    began = time.process_time()
    for one in frames:
        server.receive(one)
    sealed = 1e6 * (time.process_time() - began) / count
    decode = msgspec.msgpack.Decoder(wire.ToController).decode
    body = wire.encode(message)
    began = time.process_time()
    for _ in range(count):
        decode(body)
    plain = 1e6 * (time.process_time() - began) / count
    report.add(
        Line("codec: frame, code and decode", round(sealed, 2), "µs", limit="one heartbeat, no sockets")
    )
    report.add(
        Line("codec: decode alone", round(plain, 2), "µs", limit="what would be left without authentication")
    )


def main() -> None:
    """Measure, print, write."""
    parser = bench_arguments("controller", __doc__ or "")
    parser.add_argument("--agents", type=int, default=12_500)
    parser.add_argument("--clock-samples", type=int, default=4, help="in each heartbeat")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report = Report("controller", quick=arguments.quick, packages=("keepstep", "msgspec", "uvloop"))
    agents = min(arguments.agents, hard - 200)
    if agents < arguments.agents:
        report.leave_out(
            f"{arguments.agents} agents", f"only {hard} descriptors are allowed here: {agents} instead"
        )
    without_authentication(report, arguments.clock_samples)
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
        run = Path(folder)
        os.chmod(run, 0o700)
        wire.run(measure(agents, 10.0 if arguments.quick else 60.0, arguments.clock_samples, report, run))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
