import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from keepstep.launch.command import addresses
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.workers.processes import Child, exit_code, failing_status, give_priority


def alone(code: str, **environ: str) -> str:
    """Run code in a process of its own: it becomes a subreaper and reaps whatever is its child."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_exit_codes_are_a_shells() -> None:
    assert [exit_code(status) for status in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_every_end_is_told_once_with_its_status() -> None:
    told = alone(
        """
        import os, signal, time
        from keepstep.launch.workers.guard import Guard
        from keepstep.launch.workers.processes import Processes
        processes, told = Processes(Guard("NO=such")), []
        for command in (["true"], ["sh", "-c", "exit 4"], ["sh", "-c", "kill -9 $$"]):
            processes.start(command[-1], command, os.environ, on_exit=told.append)
        while len(told) < 3:
            processes.reap()
        print(sorted(child.status for child in told), all(not child.alive for child in told))
        """
    )
    assert told == "[-9, 0, 4] True"


def test_children_begin_with_the_descriptors_that_the_launcher_was_given() -> None:
    told = alone(
        """
        import os, resource, subprocess
        from keepstep.core.descriptors import raise_limit
        from keepstep.launch.workers.guard import Guard
        from keepstep.launch.workers.processes import Processes
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 700))
        processes, ended = Processes(Guard("NO=such"), raise_limit()), []
        child = processes.start(
            "shell", ["sh", "-c", "ulimit -S -n; ulimit -H -n"], os.environ,
            on_exit=ended.append, stdout=subprocess.PIPE,
        )
        print(*child.stdout.read().split(), *resource.getrlimit(resource.RLIMIT_NOFILE))
        while not ended:
            processes.reap()
        """
    )
    assert told == "b'512' b'700' 700 700"


@pytest.mark.parametrize(("command", "status"), [("exit 4", 4), ("kill -9 $$", -9), ("exit 0", None)])
def test_a_failure_is_seen_before_anybody_is_told(command: str, status: int | None) -> None:
    with subprocess.Popen(["sh", "-c", command]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert failing_status(process.pid) == status
    assert failing_status(process.pid) is None


def test_who_has_a_thread_that_runs_has_not_failed() -> None:
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print(flush=True)"
    number = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    code += f"; ctypes.CDLL(None).syscall({number}, 3)"  # _exit of the main thread alone
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stat = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        assert failing_status(process.pid) is None
        process.kill()


def test_a_low_priority_is_taken_back() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        autogroup = Path(f"/proc/{process.pid}/autogroup")
        if not autogroup.exists() or not autogroup.read_text():
            process.kill()
            pytest.skip("this kernel has no autogroups")
        child = Child("sleep", process.pid, 0.0)

        async def given(*, low: bool) -> tuple[str, bool]:
            done = asyncio.Event()
            give_priority(child, low=low, idle=True, then=done.set)
            await done.wait()
            return autogroup.read_text().split()[-1], os.sched_getscheduler(child.pid) == os.SCHED_IDLE

        assert asyncio.run(given(low=True)) == ("19", os.geteuid() == 0)
        assert asyncio.run(given(low=False)) == ("0", False)
        process.kill()
    assert asyncio.run(_given_to_nobody(child))


async def _given_to_nobody(child: Child) -> bool:
    """Whether a process that has ended is not tried again."""
    done = asyncio.Event()
    give_priority(child, low=True, then=done.set)
    return done.is_set()


def test_the_newest_wish_for_a_priority_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    child, tried = Child("x", 1, 0.0), list[bool]()

    def refuse_at_first(leader: int, low: bool, idle: bool) -> bool:
        tried.append(low)
        return len(tried) > 2

    async def main() -> None:
        done = asyncio.Event()
        give_priority(child, low=True, then=done.set)
        give_priority(child, low=False, then=done.set)
        await done.wait()

    monkeypatch.setattr("keepstep.launch.workers.processes._AGAIN_S", 0.0)
    monkeypatch.setattr("keepstep.launch.workers.processes._set_priority", refuse_at_first)
    asyncio.run(main())
    assert tried == [True, False, False]


def test_orphans_are_adopted_and_found() -> None:
    told = alone(
        """
        import os, signal
        from keepstep.launch.workers.guard import Guard
        from keepstep.launch.workers.processes import Processes, descendants
        guard = Guard("NO=such")
        processes, ended = Processes(guard), []
        # setsid: neither the session nor the group of the child that dies.
        processes.start("parent", ["sh", "-c", "setsid sleep 600 & exit 0"], os.environ, on_exit=ended.append)
        while not ended:
            processes.reap()
        found = []
        while not found:
            found = descendants(os.getpid(), frozenset({guard.pid}))
        os.kill(found[0], signal.SIGKILL)
        while processes.reap() != found:
            pass
        print(len(found), descendants(os.getpid(), frozenset({guard.pid})))
        """
    )
    assert told == "1 []"


def test_the_guard_ends_groups_and_carriers_of_the_cookie() -> None:
    told = alone(
        """
        import os, signal, subprocess, sys
        from keepstep.launch.workers.guard import Guard
        cookie = f"KEEPSTEP_JOB={os.getpid()}"
        name, value = cookie.split("=")
        launcher = os.fork()
        if launcher == 0:
            guard = Guard(cookie)
            group = subprocess.Popen(["sleep", "600"], start_new_session=True)
            carrier = subprocess.Popen(["sleep", "600"], start_new_session=True, env={**os.environ, name: value})
            quiet = subprocess.DEVNULL
            stranger = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=quiet, stderr=quiet)
            guard.add(group.pid, at_once=True)
            print(group.pid, carrier.pid, stranger.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(launcher, 0)
        """,
    )
    group, carrier, stranger = map(int, told.split())

    def gone(pid: int) -> bool:
        try:
            return b") Z " in Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return True

    while not (gone(group) and gone(carrier)):
        pass
    assert not gone(stranger)
    os.kill(stranger, signal.SIGKILL)


def test_a_companion_that_keeps_dying_is_given_up() -> None:
    told = alone(
        """
        import asyncio, os, signal, sys
        from keepstep.launch.node import programs as companions
        from keepstep.launch.workers.guard import Guard
        from keepstep.launch.workers.processes import Processes

        companions.FIRST_WAIT_S = 0.0
        guard = Guard("KEEPSTEP_JOB=none")

        async def main():
            loop, processes = asyncio.get_running_loop(), Processes(guard)
            loop.add_signal_handler(signal.SIGCHLD, processes.reap)
            for command in (["sh", "-c", "exit 1"], ["sh", "-c", "exit 2"], ["/no/such/program"]):
                starts, gave_up = [], loop.create_future()
                def one(command=command):
                    starts.append(1)
                    return command
                companions.Companion(
                    "x", one, processes, gave_up=gave_up.set_result, ready=lambda said: None
                ).start()
                reason = await gave_up
                print(len(starts), reason.splitlines()[0][:22])

        asyncio.run(main())
        guard.close()
        """
    )
    assert told.splitlines() == [
        "9 ended with status 1",
        "1 ended with status 2",
        "9 x: cannot start /no/su",
    ]


def test_a_companion_whose_work_is_done_is_not_ready_any_more() -> None:
    told = alone(
        """
        import asyncio, signal
        from keepstep.launch.node import programs as companions
        from keepstep.launch.workers.guard import Guard
        from keepstep.launch.workers.processes import Processes

        guard = Guard("KEEPSTEP_JOB=none")
        ready = ["sh", "-c", "echo '{\\"ready\\": true}'; sleep 60"]

        async def main():
            loop, processes = asyncio.get_running_loop(), Processes(guard)
            loop.add_signal_handler(signal.SIGCHLD, processes.reap)
            for done in (False, True):
                heard = asyncio.Event()
                one = companions.Companion(
                    "x", lambda: ready, processes, gave_up=print, ready=lambda said: heard.set()
                )
                one.start()
                if done:
                    one.may_end()
                await asyncio.wait([asyncio.ensure_future(heard.wait())], timeout=0.5 if done else 60)
                print(heard.is_set())
                await one.stop(60)

        asyncio.run(main())
        guard.close()
        """
    )
    assert told.split() == ["True", "False"]


def test_which_hosts_are_this_one() -> None:
    assert addresses.is_this_host("localhost")
    assert addresses.is_this_host("127.0.0.1")
    assert addresses.is_this_host(os.uname().nodename)
    assert not addresses.is_this_host("192.0.2.1")  # set aside for documentation: nobody's


def test_listening_stays_on_the_address_given() -> None:
    assert addresses.listen_address(Endpoint("127.0.0.1", 1)) == "127.0.0.1"
    assert addresses.listen_address(Endpoint("localhost", 1)) in ("127.0.0.1", "::1")
    assert addresses.listen_address(Endpoint("192.0.2.7", 1)) == "192.0.2.7"
    assert addresses.own_address("192.0.2.7", "127.0.0.1") == "192.0.2.7"
    assert addresses.own_address("", "127.0.0.1") == "127.0.0.1"


def test_only_one_launcher_of_a_machine_claims_a_rendezvous() -> None:
    port = addresses.free_port("127.0.0.1")
    first = addresses.claim_host(port)
    assert first is not None
    assert addresses.claim_host(port) is None
    first.close()
    again = addresses.claim_host(port)
    assert again is not None
    again.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take a name as another user")
@pytest.mark.parametrize("listening", [True, False])
def test_another_users_socket_stops_no_launcher(listening: bool) -> None:
    port = addresses.free_port("127.0.0.1")
    theirs = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.seteuid(65534)
    try:
        theirs.bind(f"\0keepstep-rendezvous-{port}-0")
        if listening:
            theirs.listen()
    finally:
        os.seteuid(0)
    first = addresses.claim_host(port)
    assert first is not None
    assert addresses.claim_host(port) is None
    first.close()
    theirs.close()
