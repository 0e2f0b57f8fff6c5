"""Link faults on live interfaces with ``tc`` and ``ip``: one pair of hosts, a whole host, or the link taken down.

Everything is undone: when the context ends, and at the interpreter's exit. Needs root.
"""

from __future__ import annotations

import atexit
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from keepstep.core.errors import FaultError
from keepstep.faults.grammar import LinkFault, SlowLink

_UNLIMITED = "40gbit"  # a rate for the traffic that is not slowed, because htb requires one
_WHOLE = 0  # number of a limit on all traffic of a host; those for single destinations count from 10
_DEFAULT_CLASS = 1


@dataclass(frozen=True, slots=True)
class Interface:
    """A host's network interface: its name, IPv4 address, and the network namespace it lives in (None: this one)."""

    name: str
    address: str
    namespace: str | None = None


def run_command(command: Sequence[str]) -> None:
    """Run ``tc`` or ``ip``. Raises :class:`FaultError` with the command and what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        raise FaultError(f"{command[0]} is not installed: install iproute2 to inject link faults") from None
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise FaultError(f"{' '.join(command)}: {said} (link faults need root)")


class LinkInjector:
    """Carries out link faults between named hosts.

    Use as a context manager: leaving it undoes whatever is still in force.
    """

    def __init__(
        self,
        hosts: Mapping[str, Interface],
        *,
        run: Callable[[Sequence[str]], None] = run_command,
    ) -> None:
        self._hosts = dict(hosts)
        self._run = run
        self._limits: dict[str, set[int]] = {}  # numbers of the limits in force, by host
        self._lock = threading.Lock()
        self._active = ExitStack()

    def __enter__(self) -> LinkInjector:
        atexit.register(self._active.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._active.close()
        atexit.unregister(self._active.close)

    @contextmanager
    def inject(self, fault: LinkFault) -> Generator[None, None, None]:
        """Keep the fault in force for as long as the context lasts; the times in the fault itself are ignored."""
        with ExitStack() as undo:
            self._apply(fault, undo)
            yield

    def play(self, faults: Sequence[LinkFault], sleep: Callable[[float], None] = time.sleep) -> None:
        """Carry out the faults at their times, counted from this call; returns after the last one is undone.

        A fault without an end stays in force until the injector's context ends.
        """
        due = [(fault.at_s, 1, fault) for fault in faults]
        due += [(fault.at_s + fault.seconds, 0, fault) for fault in faults if fault.seconds is not None]
        running: dict[LinkFault, ExitStack] = {}
        now = 0.0
        with ExitStack() as stack:
            for moment, begins, fault in sorted(due, key=lambda item: item[:2]):
                sleep(moment - now)
                now = moment
                if begins and fault.seconds is None:
                    self._apply(fault, self._active)
                elif begins:
                    running[fault] = stack.enter_context(ExitStack())
                    self._apply(fault, running[fault])
                else:
                    running[fault].close()

    def _interface(self, host: str) -> Interface:
        if host not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            raise FaultError(f'no host "{host}" to inject a link fault on; there are: {known}')
        return self._hosts[host]

    def _apply(self, fault: LinkFault, undo: ExitStack) -> None:
        interface = self._interface(fault.host)
        if isinstance(fault, SlowLink):
            if fault.peer is None:
                self._slow_host(fault.host, interface, fault.rate, undo)
                return
            peer = self._interface(fault.peer)
            self._slow_towards(fault.host, interface, peer.address, fault.rate, undo)
            self._slow_towards(fault.peer, peer, interface.address, fault.rate, undo)
        else:
            self._call("ip", interface, "link", "set", "dev", interface.name, "down")
            undo.callback(self._call, "ip", interface, "link", "set", "dev", interface.name, "up")

    def _slow_host(self, host: str, interface: Interface, rate: str, undo: ExitStack) -> None:
        with self._lock:
            limits = self._limits_of(host)
            if limits:
                raise _slowed(host)
            shape = ("rate", rate, "burst", "64kb", "latency", "400ms")
            self._tc(interface, "qdisc", "add", "root", "tbf", *shape)
            limits.add(_WHOLE)
        undo.callback(self._clear, host, interface, _WHOLE)

    def _slow_towards(
        self, host: str, interface: Interface, destination: str, rate: str, undo: ExitStack
    ) -> None:
        with self._lock:
            limits = self._limits_of(host)
            if not limits:
                default = str(_DEFAULT_CLASS)
                self._tc(interface, "qdisc", "add", "root", "handle", "1:", "htb", "default", default)
                try:
                    everything = ("parent", "1:", "classid", f"1:{default}", "htb", "rate", _UNLIMITED)
                    self._tc(interface, "class", "add", *everything)
                except FaultError:
                    self._tc(interface, "qdisc", "del", "root")
                    raise
            number = max(limits, default=9) + 1
            limits.add(number)
        undo.callback(self._clear, host, interface, number)
        slow = ("parent", "1:", "classid", f"1:{number}", "htb", "rate", rate, "ceil", rate)
        self._tc(interface, "class", "add", *slow)
        match = ("u32", "match", "ip", "dst", f"{destination}/32", "flowid", f"1:{number}")
        self._tc(interface, "filter", "add", "protocol", "ip", "parent", "1:", "prio", str(number), *match)

    def _limits_of(self, host: str) -> set[int]:
        """What is in force on a host, of whose link a part may still be slowed."""
        limits = self._limits.setdefault(host, set())
        if _WHOLE in limits:
            raise _slowed(host)
        return limits

    def _clear(self, host: str, interface: Interface, number: int) -> None:
        with self._lock:
            self._limits[host].discard(number)
            if self._limits[host]:
                of_filter = ("parent", "1:", "protocol", "ip", "prio", str(number))
                self._tc(interface, "filter", "del", *of_filter)
                self._tc(interface, "class", "del", "classid", f"1:{number}")
                return
            self._tc(interface, "qdisc", "del", "root")

    def _tc(self, interface: Interface, kind: str, verb: str, *arguments: str) -> None:
        self._call("tc", interface, kind, verb, "dev", interface.name, *arguments)

    def _call(self, program: str, interface: Interface, *arguments: str) -> None:
        where = ["-netns", interface.namespace] if interface.namespace else []
        self._run([program, *where, *arguments])


def _slowed(host: str) -> FaultError:
    return FaultError(f"the link of {host} is slowed already; wait for that to end")
