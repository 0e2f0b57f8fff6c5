"""What Slurm is told of bad nodes, with a stand-in for scontrol that writes down its orders."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.core.incident import Culprit, Incident
from keepstep.launch.slurm_orders import DRAIN, DRAINS, NodeRemedy, SlurmOrders, output_of
from keepstep.report.ended_run import End
from keepstep.report.incidents import incident_to_json

LOST = Culprit(node="n2", confidence="medium", cause="node lost")
CRASH = Incident(1, "crash", 3, 3, None, None, (LOST,), (), (), ())
REASON = "[node_problem] keepstep run=12 incident=0001 node lost"
SCONTROL = """#!/bin/sh
echo "$@" >> {log}
[ "$1 $2" = "show job" ] && echo "JobId=$3 JobState={job}" && echo "   AdminComment=a" &&
    if [ -e {log}.comment ]; then echo "   Comment=$(cat {log}.comment)"; fi && exit
[ "$1" = show ] && case "$3" in n[12]) port={port};; *) port={others};; esac &&
    printf '%s\\n' "NodeName=$3 State={state} NodeAddr=127.0.0.1 Port=$port" "   Extra=Reason=y" "   {reason}" && exit
[ "$1" = update ] && case "$3" in Comment=*) echo "${{3#Comment=}}" > {log}.comment;; esac
[ "$1" = update ] && case "$2" in NodeName=*) exit {refuses};; esac
exit 0
"""


class Bed:
    """A run's folder and a stand-in for scontrol."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
        self.folder, self._patch = folder, monkeypatch
        self._answers = answers  # the port of the nodes that are not lost
        self.said: list[str] = []
        (folder / "incidents").mkdir()
        self.scontrol()

    def scontrol(
        self,
        *,
        state: str = "ALLOCATED",
        reason: str = "Reason=x",
        port: int = 1,
        refuses: int = 0,
        job: str = "RUNNING",
        others: int | None = None,
    ) -> None:
        program = self.folder / "bin" / "scontrol"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            SCONTROL.format(
                log=self.folder / "log",
                state=state,
                reason=reason,
                port=port,
                refuses=refuses,
                job=job,
                others=others or self._answers,
            )
        )
        program.chmod(0o755)
        self._patch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    def orders(
        self, remedy: NodeRemedy = "auto", nodes: int = 4, drain: tuple[str, ...] = DRAIN
    ) -> SlurmOrders:
        names = [f"n{number}" for number in range(nodes)]
        return SlurmOrders("12", names, self.folder, remedy, self.said.append, drain)

    def incident(self, incident: Incident = CRASH) -> None:
        path = self.folder / "incidents" / f"{incident.number:04d}.json"
        path.write_bytes(incident_to_json(incident))

    @property
    def given(self) -> list[str]:
        """Orders that change something."""
        lines = (self.folder / "log").read_text().splitlines() if (self.folder / "log").exists() else []
        return [line for line in lines if not line.startswith("show")]


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    with socket.create_server(("127.0.0.1", 0)) as answers:
        yield Bed(tmp_path, monkeypatch, answers.getsockname()[1])


def test_a_lost_node_is_drained_once_with_a_reason(bed: Bed) -> None:
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    bed.incident(replace(CRASH, status="relieved"))
    asyncio.run(orders.look())
    assert bed.given == [
        f"update NodeName=n2 State=DRAIN Reason={REASON}",
        f"update JobId=12 Comment={REASON}",
    ]
    assert bed.said == [f"drained n2: {REASON}"]
    assert orders.bad == ["n2"]


def test_by_default_it_is_said(bed: Bed) -> None:
    orders = bed.orders("advise")
    bed.incident()
    asyncio.run(orders.look())
    assert bed.given == [f"update JobId=12 Comment={REASON}"]
    assert bed.said == [f"n2 should be drained: {REASON} (--node-remedy=auto does it)"]


def test_off_means_off(bed: Bed) -> None:
    orders = bed.orders("off")
    bed.incident()
    asyncio.run(orders.look())
    assert (bed.given, bed.said, orders.bad) == ([], [], [])


@pytest.mark.parametrize("remedy", ["off", "advise", "auto"])
def test_what_an_operator_drains_is_drained_once_by_slurm_whatever_the_remedy(
    bed: Bed, remedy: NodeRemedy
) -> None:
    status, earlier = bed.folder / "status.json", {"node": "n1", "why": "of an earlier run", "incarnation": 1}
    status.write_text(json.dumps({"drained": [earlier]}))
    orders = bed.orders(remedy)
    told = {"node": "n2", "why": "fan; \x1b[31m loud", "incarnation": 1}
    for drained in ([earlier], [told], [told], [told, {**told, "node": "n3"}]):
        status.write_text(json.dumps({"drained": drained}))
        asyncio.run(orders.look())
    reason = r"[node_problem] keepstep run=12 by hand: fan; \x1b[31m loud"
    assert bed.said == [f"drained n2: {reason}", f"drained n3: {reason}"], "no budget bounds it"
    assert orders.bad == ["n2", "n3"]


def test_somebody_elses_drain_stays_though_an_operator_asks(bed: Bed) -> None:
    bed.scontrol(state="IDLE+DRAIN")
    orders = bed.orders("off")
    (bed.folder / "status.json").write_text('{"drained": [{"node": "n2", "why": "x", "incarnation": 1}]}')
    asyncio.run(orders.look())
    assert bed.said == ["n2 is drained or down already; [node_problem] keepstep run=12 by hand: x"]


def test_a_node_that_answers_is_left_alone(bed: Bed) -> None:
    async def look() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            bed.scontrol(port=server.sockets[0].getsockname()[1])
            await orders.look()

    orders = bed.orders()
    bed.incident()
    asyncio.run(look())
    assert (bed.given, bed.said, orders.bad) == ([], [], [])


def test_a_host_that_reaches_no_node_judges_none(bed: Bed) -> None:
    bed.scontrol(others=1)
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    assert (bed.given, bed.said, orders.bad) == ([], [], []), "a firewall is no fault of the node"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("DRAINED*", "Reason=x"),
        ("DOWN+NOT_RESPONDING", "Reason=x"),
        ("DOWN", "Reason=fan of rack 7 [root@2026-01-02T03:04:05]"),
        ("DOWN*", "Reason=fan : Not responding [slurm@2026-01-02T03:04:05]"),
        ("IDLE+DRAIN", ""),
        ("DOWN*+DRAIN", "Reason=Not responding [slurm@2026-01-02T03:04:05]"),
    ],
)
def test_somebody_elses_drain_stays_as_it_is(bed: Bed, state: str, reason: str) -> None:
    bed.scontrol(state=state, reason=reason)
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    assert bed.given == [f"update JobId=12 Comment={REASON}"]
    assert bed.said == [f"n2 is drained or down already; {REASON}"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("DOWN*", "Reason=Not responding [slurm@2026-01-02T03:04:05]"),
        ("DOWN+NOT_RESPONDING", "Reason=Not responding"),
        ("DOWN", ""),
        ("DOWN", "Reason=none"),
        ("ALLOCATED+POWERED_DOWN", "Reason=x"),
    ],
)
def test_a_node_that_is_only_down_is_drained_as_slurm_would_give_it_away_once_it_answers(
    bed: Bed, state: str, reason: str
) -> None:
    bed.scontrol(state=state, reason=reason)
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    assert bed.said == [f"drained n2: {REASON}"]
    assert bed.given[0] == f"update NodeName=n2 State=DRAIN Reason={REASON}"


def test_who_may_not_drain_sees_that_said_and_the_job_avoids_the_node(bed: Bed) -> None:
    bed.scontrol(refuses=1)
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    assert bed.said == [f"Slurm does not drain n2 (exit code 1): tell who runs the cluster; {REASON}"]
    assert asyncio.run(orders.requeue())
    assert bed.given[-2:] == [
        "requeue 12",
        "update JobId=12 ExcNodeList=n2 StartTime=now+15seconds",
    ]


def test_many_lost_at_once_are_the_networks(bed: Bed) -> None:
    orders = bed.orders(nodes=19)
    bed.incident(replace(CRASH, culprits=(LOST, replace(LOST, node="n3"))))
    asyncio.run(orders.look())
    assert (bed.given, bed.said) == ([], [])


def test_no_more_are_drained_than_the_budget_allows(bed: Bed) -> None:
    orders = bed.orders()
    for number in (1, 2):
        bed.incident(replace(CRASH, number=number, culprits=(replace(LOST, node=f"n{number}"),)))
        asyncio.run(orders.look())
    assert [line.split()[1] for line in bed.given] == ["NodeName=n1", "JobId=12", "JobId=12"]
    assert "is left as it is, as other nodes were drained within the hour" in bed.said[1]


def test_a_later_start_of_the_job_has_what_is_left_of_the_budget(bed: Bed) -> None:
    first = bed.orders()
    bed.incident()
    asyncio.run(first.look())
    again = bed.orders()
    bed.incident(replace(CRASH, number=2, culprits=(replace(LOST, node="n1"),)))
    asyncio.run(again.look())
    assert bed.said[1].startswith("n1 is left as it is, as other nodes were drained within the hour")
    (kept,) = json.loads((bed.folder / DRAINS).read_text())["drained_unix_s"]
    (bed.folder / DRAINS).write_text(json.dumps({"drained_unix_s": [kept - 3600]}))
    after_an_hour = bed.orders()
    bed.incident(replace(CRASH, number=3, culprits=(replace(LOST, node="n1"),)))
    asyncio.run(after_an_hour.look())
    assert bed.said[2].startswith("drained n1: ")
    assert len(json.loads((bed.folder / DRAINS).read_text())["drained_unix_s"]) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not of keepstep's form"),
        (b"[]", "is not of keepstep's form"),
        (b'{"drained_unix_s": 7}', "is not of keepstep's form"),
        (b'{"drained_unix_s": [null]}', "is not of keepstep's form"),
        (b'{"drained_unix_s": [1' + b"0" * 400 + b"]}", "is not of keepstep's form"),
        (b"\xff\xfe", "is not of keepstep's form"),
        (b"[" * 60_000, "is not of keepstep's form"),
        (b" " * (1 << 21), "is larger than"),
    ],
    ids=lambda one: repr(one[:30]),
)
def test_drains_that_cannot_be_read_are_a_line_and_the_node_is_drained(
    bed: Bed, content: bytes, why: str
) -> None:
    (bed.folder / DRAINS).write_bytes(content)
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    assert bed.said[0].startswith(f"{bed.folder / DRAINS}: {why}")
    assert bed.said[1:] == [f"drained n2: {REASON}"]
    assert bed.orders("advise") is not None
    assert len(bed.said) == 2, "the file is whole again, and nobody reads it where nothing is drained"


def test_drains_that_cannot_be_kept_are_a_line(bed: Bed) -> None:
    (bed.folder / DRAINS).mkdir()
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    assert [line.partition(": ")[2][:11] for line in bed.said[:1]] == ["is a folder"]
    assert "cannot be written" in bed.said[1]
    assert bed.said[2:] == [f"drained n2: {REASON}"]


def test_a_drain_of_the_future_counts_for_an_hour_from_now(bed: Bed) -> None:
    (bed.folder / DRAINS).write_text(json.dumps({"drained_unix_s": [time.time() + 1e6]}))
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    assert "is left as it is, as other nodes were drained within the hour" in bed.said[0]


def test_a_site_has_its_own_command_without_a_shell(bed: Bed) -> None:
    orders = bed.orders(drain=("scontrol", "site", "{node}; touch x", "{reason}"))
    bed.incident()
    asyncio.run(orders.look())
    assert bed.given[0] == f"site n2; touch x {REASON}"
    assert not Path("x").exists()


def test_incidents_of_an_earlier_run_count_not(bed: Bed) -> None:
    bed.incident()
    orders = bed.orders()
    asyncio.run(orders.look())
    assert (bed.given, bed.said) == ([], [])


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (None, "scontrol: No such file or directory"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "Unable to contact slurm controller"),
        ("sleep 60", "no answer for 0 s"),
        ("printf 'a\\nb;\\033[31mc\\n' >&2; exit 1", r"b;\x1b[31mc"),
    ],
)
def test_while_slurm_does_not_answer_nothing_is_done_and_later_it_is(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, program: str | None, why: str
) -> None:
    monkeypatch.setattr("keepstep.launch.slurm_orders._COMMAND_S", 0.3)
    monkeypatch.setattr("keepstep.launch.slurm_orders._AGAIN_S", 0.0)
    scontrol = bed.folder / "bin" / "scontrol"
    if program is None:
        scontrol.unlink()
        monkeypatch.setenv("PATH", str(scontrol.parent))
    else:
        scontrol.write_text(f"#!/bin/sh\n{program}\n")
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    asyncio.run(orders.look())
    told = "the node is left as it is until it answers"
    assert bed.said == [f"`scontrol show node n2` fails ({why}): {told}; {REASON}"], "said once"
    assert (bed.given, orders.bad) == ([], []), "whether the node answers is not known"
    bed.scontrol()
    monkeypatch.setattr("keepstep.launch.slurm_orders._COMMAND_S", 10.0)
    asyncio.run(orders.watch(lambda: True))
    assert bed.said[1:] == [f"drained n2: {REASON}"]


@pytest.mark.parametrize(("proven_s", "drained"), [(60.0, ["n2"]), (0.0, [])])
def test_of_a_lost_node_nothing_is_done_once_its_silence_proves_nothing(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, proven_s: float, drained: list[str]
) -> None:
    """Slurm answers only after so long; by then somebody may have its slurmd down to mend it."""
    monkeypatch.setattr("keepstep.launch.slurm_orders._AGAIN_S", 0.0)
    scontrol = bed.folder / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    monkeypatch.setattr("keepstep.launch.slurm_orders._PROVEN_S", proven_s)
    bed.scontrol()
    asyncio.run(orders.look())
    bed.incident(replace(CRASH, status="ended"))
    asyncio.run(orders.look())
    assert orders.bad == drained
    assert [line.split()[1] for line in bed.given] == (["NodeName=n2", "JobId=12"] if drained else [])


def test_the_users_own_comment_stays_in_front(bed: Bed) -> None:
    comment = bed.folder / "log.comment"
    comment.write_text("mine; see [ticket] 7\n")
    orders = bed.orders("advise")
    bed.incident()
    asyncio.run(orders.look())
    assert comment.read_text() == f"mine; see [ticket] 7; {REASON}\n"
    asyncio.run(orders.tell_end(End(1, 1.0, "training", "rank 1 failed", "")))
    assert comment.read_text() == "mine; see [ticket] 7; [keepstep] run=12 exit=1 (training) rank 1 failed\n"
    comment.write_text("(null)\n")
    asyncio.run(orders.tell_end(End(1, 1.0, "training", "rank 1 failed", "")))
    assert comment.read_text() == "[keepstep] run=12 exit=1 (training) rank 1 failed\n"


def test_the_comment_tells_how_a_job_ended_and_why(bed: Bed) -> None:
    (bed.folder / "incidents" / "0002.txt").write_text('CRASH  rank 1 (n1): "no\x1b[31m label"\nmore\n')
    orders = bed.orders("advise")
    asyncio.run(orders.tell_end(End(1, 1.0, "training", "rank 1 failed", "0002")))
    said = r"[keepstep] run=12 exit=1 (training) incident=0002 CRASH rank 1 (n1): 'no\x1b[31m label'"
    assert bed.given == [f"update JobId=12 Comment={said}"]
    asyncio.run(orders.tell_end(End(0, 1.0, "finished", "finished", "")))
    asyncio.run(bed.orders("off").tell_end(End(1, 1.0, "training", "x" * 999, "")))
    assert len(bed.given) == 1, "a job that finished keeps its comment, and off says nothing"
    asyncio.run(orders.tell_end(End(1, 1.0, "training", "x" * 999, "")))
    assert len(bed.given[-1]) == len("update JobId=12 Comment=") + 200


def test_a_comment_that_cannot_be_read_is_not_replaced(bed: Bed) -> None:
    (bed.folder / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {bed.folder}/log; exit 1\n')
    asyncio.run(bed.orders("advise").tell_end(End(1, 1.0, "training", "rank 1 failed", "")))
    assert bed.given == []


def test_a_reason_is_not_taken_for_the_state(bed: Bed) -> None:
    bed.scontrol(state="IDLE+DRAIN", reason="Reason=was State=IDLE")
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    assert bed.said == [f"n2 is drained or down already; {REASON}"]


def test_a_job_that_was_cancelled_is_not_requeued(bed: Bed) -> None:
    bed.scontrol(job="COMPLETING")
    assert not asyncio.run(bed.orders().requeue())
    assert bed.given == []
    assert bed.said == ["the job is not requeued: it was cancelled, or Slurm has ended it"]


def test_a_job_of_which_slurm_tells_nothing_is_not_requeued(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.launch.slurm_orders._AWAY_S", 0.1)
    (bed.folder / "bin" / "scontrol").write_text("#!/bin/sh\necho away >&2; exit 1\n")
    assert not asyncio.run(bed.orders().requeue())
    (said,) = bed.said
    assert said.startswith(
        "`scontrol show job 12` fails (away): the job is not requeued; say `scontrol requeue 12`"
    )


def test_a_requeue_that_is_refused_is_told(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.launch.slurm_orders._COMMAND_S", 0.1)
    program = bed.folder / "bin" / "scontrol"
    program.write_text('#!/bin/sh\n[ "$1" = show ] && echo JobState=RUNNING && exit\necho no >&2; exit 1\n')
    assert not asyncio.run(bed.orders().requeue())
    assert bed.said == ["Slurm refuses `scontrol requeue 12`: no"]


def test_a_scontrol_that_hangs_in_a_wrapper_is_given_up(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.launch.slurm_orders._COMMAND_S", 0.2)
    (bed.folder / "bin" / "scontrol").write_text("#!/bin/sh\nsleep 60; exit 0\n")
    began_s = time.monotonic()
    assert asyncio.run(output_of("scontrol", "show", "node", "n2")) == ""
    assert time.monotonic() - began_s < 30


def test_faults_of_the_last_moment_are_seen(bed: Bed) -> None:
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.watch(lambda: True))
    assert orders.bad == ["n2"]


def test_a_drained_node_is_given_back_once_its_launcher_has_ended(bed: Bed) -> None:
    orders = bed.orders()
    bed.incident()
    asyncio.run(orders.look())
    assert not [line for line in bed.given if "NodeList" in line]
    orders.left.add("n2")
    asyncio.run(orders.look())
    asyncio.run(orders.look())
    assert [line for line in bed.given if "NodeList" in line] == ["update JobId=12 NodeList=n0,n1,n3"]
    assert bed.said[-1] == "n2 is given back to Slurm: nothing of the job runs there"


def test_the_node_of_the_batch_script_is_not_given_back(bed: Bed) -> None:
    orders = bed.orders()
    bed.incident(replace(CRASH, culprits=(replace(LOST, node="n0"),)))
    bed.scontrol(others=1)
    orders.left.add("n0")
    asyncio.run(orders.look())
    assert not [line for line in bed.given if "NodeList" in line]
