"""What the kernel's log says of a node: NVIDIA's Xids after their catalogue, NVSwitches, memory, disks, networks."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from tests.unit.launch.local_runs import ToldRun

from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.node import node_checks
from keepstep.launch.node.checks import Found, Subject, kernel_log
from keepstep.launch.node.checks.xids import ACTIONS, PASSING, UNFIT, Xid, catalogue
from keepstep.launch.node.node_checks import NodeChecks

GPU = "NVRM: Xid (PCI:0000:3b:00)"
SWITCH = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0)"
LINK = "NVLink: fatal error detected on link 6"


def judge(*lines: str, fresh: bool = False) -> Found | None:
    """What is found in a log of these lines; they came a second apart, the first after a second."""
    records = [f"3,{i},{i}000000,-;{line}\n DEVICE=x\n".encode() for i, line in enumerate(lines, 1)]
    with tempfile.NamedTemporaryFile() as log:
        log.writelines(records)
        log.flush()
        found = list(kernel_log.look(Subject("gpu-1", 2, fresh=fresh, kernel_log=log.name)))
    assert len(found) <= 1
    assert all(len(one.text) < 500 for one in found)  # the longest line that nodes tell each other
    return found[0] if found else None


def test_the_catalogue_is_whole() -> None:
    assert {xid.action for xid in catalogue().values()} <= set(ACTIONS)
    assert not UNFIT & PASSING
    assert set(ACTIONS) >= UNFIT | PASSING
    needed = (
        46,
        48,
        62,
        63,
        64,
        74,
        79,
        92,
        94,
        95,
        109,
        110,
        119,
        120,
        136,
        140,
        *range(143, 151),
        155,
        156,
        158,
    )
    assert set(needed) <= catalogue().keys()


@pytest.mark.parametrize("xid", catalogue().values(), ids=lambda xid: str(xid.number))
def test_the_action_decides_whether_the_node_is_unfit(xid: Xid) -> None:
    found = judge(f"{GPU}: {xid.number}, pid='<unknown>', name=<unknown>, what happened")
    assert found is not None
    resets = {
        "RESET_GPU",
        "RESTART_BM",
        "RESTART_VM",
        "CONTACT_SUPPORT",
        "CHECK_MECHANICALS",
        "WORKFLOW_XID_48",
    }
    assert found.unfit == (xid.action in resets)
    assert f"Xid {xid.number} ({xid.name}), in NVIDIA's catalogue {xid.action}: " in found.text
    assert ("broken hardware" in found.text) == found.unfit


@pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 92, 94])
def test_what_ends_with_the_application_never_makes_a_node_unfit(number: int) -> None:
    line = f"{GPU}: {number}, pid=4711, name=python, Fatal error in channel 8"
    found = judge(line)
    assert found is not None
    assert not found.unfit
    assert found.text.endswith("; the node stays in use")
    assert judge(line, fresh=True) is None  # it says nothing about the next application


@pytest.mark.parametrize(
    ("line", "unfit", "told"),
    [
        (f"{GPU}: 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", True, "RESTART_BM"),
        ("NVRM: Xid (0000:03:00): 79, GPU has fallen off the bus.", True, "RESTART_BM"),
        ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", True, "Xid 79"),
        ("NVRM: fallen off the bus and is not responding to commands.", True, "Xid 79"),
        (
            "NVRM: Xid (PCI:0000:61:00): 94, pid=7, name=python, Contained: SM (0x1). RST: No",
            False,
            "RESTART_APP",
        ),
        (f"{GPU}: 95, pid=7, name=python, Uncontained: LTC TAG (0x2,0x0). RST: Yes", True, "RESET_GPU"),
        (f"{GPU}: 63, pid=7, name=python, Row Remapper: New row marked for remapping", False, "IGNORE"),
        (f"{GPU}: 999, pid=7, name=python, Something new", False, "keepstep does not know Xid 999"),
        (f"{GPU}: 61, pid=7, name=python, PMU breakpoint", False, "keepstep does not know Xid 61"),
        (f"{GPU}: 790, pid=7, name=python, Something new", False, "keepstep does not know Xid 790"),
    ],
)
def test_the_shapes_of_lines(line: str, unfit: bool, told: str) -> None:
    found = judge("usb 1-1: new device", line, "eth0: link up")
    assert found is not None
    assert (found.unfit, told in found.text, line[:160] in found.text) == (unfit, True, True)


@pytest.mark.parametrize(
    ("line", "unfit"),
    [
        (f"{GPU}: 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x0 0x0 0x0 0x0)", True),
        (f"{GPU}: 145, RLW_RXPIPE Nonfatal XC0 i0 Link 00 (0x00000006 0x00000008 0x0 0x0 0x0 0x0)", False),
        (f"{GPU}: 144, pid=12, name=python, SAW_MVB Non-fatal XC0 i0 Link -1 (0x00000021 0x00000001)", False),
        (f"{GPU}: 74, pid=1, name=x, {LINK}(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", True),
        (f"{GPU}: 74, pid=1, name=x, {LINK}(0x800001, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0)", False),
        (f"{GPU}: 74, pid=1, name=x, NVLink: link 6 failed to train", False),
        (f"{GPU}: 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", True),
        (f"{GPU}: 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", True),
        (f"{GPU}: 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", False),
        (f"{GPU}: 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", False),
    ],
)  # fmt: skip
def test_where_the_catalogue_says_that_it_depends_the_line_decides(line: str, unfit: bool) -> None:
    found = judge(line)
    assert found is not None
    assert found.unfit == unfit


DOUBLE = f"{GPU}: 48, pid=7, name=python, DBE (double bit error) ECC error"


@pytest.mark.parametrize(
    ("others", "unfit"),
    [
        ((), True),
        ((f"{GPU}: 63, Row Remapper: New row marked for remapping", f"{GPU}: 45, pid=7"), False),
        ((f"{GPU}: 94, pid=7, name=python, Contained: SM (0x1)",), False),
        ((f"{GPU}: 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",), False),
        (
            ("NVRM: Xid (PCI:0000:61:00): 63, Row Remapper: New row marked for remapping",),
            True,
        ),  # another GPU
        ((f"{GPU}: 64, Row Remapper: remapping failed",), True),
        ((f"{GPU}: 63, Row Remapper: remapped", f"{GPU}: 95, pid=7, Uncontained"), True),
        (
            (
                f"{GPU}: 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
                f"{GPU}: 154, GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 (GPU Reset Required)",
            ),
            True,
        ),
    ],
)
def test_a_double_bit_error_counts_unless_it_was_contained(others: tuple[str, ...], unfit: bool) -> None:
    found = judge(DOUBLE, *others)
    assert found is not None
    assert found.unfit == unfit


@pytest.mark.parametrize(
    ("lines", "unfit", "told"),
    [
        ((f"{SWITCH}: 20034, Fatal, Link 30 LTSSM Fault Up",), True, "SXid 20034 of an NVSwitch, fatal"),
        ((f"{SWITCH}: 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",), False, "SXid 12028"),
        ((f"{SWITCH}: 12028, something else",), False, "does not say that it is fatal"),
        (
            (
                f"{SWITCH}: 20034, Fatal, Link 30 LTSSM Fault Up",
                f"{SWITCH}: 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
                f"{SWITCH}: 20034, Data {{0x50610005, 0x10100030, 0x00000000}}",
            ),
            True,
            "LTSSM Fault Up; SXid",  # details count as no error of their own
        ),
    ],
)
def test_errors_of_switches(lines: tuple[str, ...], unfit: bool, told: str) -> None:
    found = judge(*lines)
    assert found is not None
    assert (found.unfit, told in found.text) == (unfit, True)


@pytest.mark.parametrize(
    ("line", "unfit", "told_at_the_start"),
    [
        ("mce: [Hardware Error]: Machine check events logged", False, False),
        ("[Hardware Error]: Corrected error, no action required.", False, False),
        ("{1}[Hardware Error]: event severity: corrected", False, False),
        ("{1}[Hardware Error]: It has been corrected by h/w and requires no further action", False, False),
        ("[Hardware Error]: CPU:24 (17:1:2) MC15_STATUS[Over|CE|MiscV|-|AddrV]: 0xdc2041000000011b", False, False),
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0", False, False),
        ("[Hardware Error]: Deferred error, no action required.", False, True),
        ("{2}[Hardware Error]: event severity: recoverable", False, True),
        ("{2}[Hardware Error]: event severity: fatal", True, True),
        ("[Hardware Error]: Uncorrected, software containable error.", True, True),
        ("[Hardware Error]: System Fatal error.", True, True),
        ("mce: [Hardware Error]: CPU 4: Machine Check Exception: 5 Bank 7: be00000000800400", True, True),
        ("mce: Uncorrected hardware memory error in user-access at 1f3e8d000", True, True),
        ("EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#1_DIMM#0", True, True),
        ("blk_update_request: I/O error, dev nvme0n1, sector 8", True, True),
        ("nvme nvme0: I/O 832 QID 1 timeout, aborting", True, True),
        ("nvme nvme0: I/O tag 832 (1340) opcode 0x2 (I/O Cmd) QID 1 timeout, aborting req_op:READ(0)", True, True),
        ("mlx5_core 0000:1a:00.0: poll_health: device's health compromised - reached miss count", True, True),
    ],
)  # fmt: skip
def test_only_uncorrected_errors_make_a_node_unfit(line: str, unfit: bool, told_at_the_start: bool) -> None:
    found = judge(line)
    assert found is not None
    assert found.unfit == unfit
    before = judge(line, fresh=True)
    assert (before is not None) == told_at_the_start
    assert before is None or not before.unfit


@pytest.mark.parametrize(
    "line",
    [
        "nvme nvme0: I/O 832 QID 1 timeout, completion polled",
        "blk_update_request: I/O error, dev sr0, sector 0",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
        "nvidia-nvswitch0: using MSI",
    ],
)
def test_the_rest_says_nothing(line: str) -> None:
    assert judge(line) is None


def test_the_gravest_is_told_the_newest_of_its_kind() -> None:
    found = judge(
        f"{GPU}: 119, pid=7, name=python, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
        f"{GPU}: 79, pid=7, name=python, GPU has fallen off the bus.",
        f"{GPU}: 45, pid=7, name=python, Ch 00000008",
    )
    assert found is not None
    assert found.text == (
        f"node gpu-1: the kernel tells of broken hardware: {GPU}: 79, pid=7, name=python, GPU has fallen off the "
        "bus. (and 1 more); Xid 79 (the GPU has fallen off the bus), in NVIDIA's catalogue RESTART_BM: restart the "
        "machine; drain the node and have it looked at"
    )
    found = judge(f"{GPU}: 94, pid=7, Contained: SM (0x1)", f"{GPU}: 45, pid=7, Ch 00000008")
    assert found is not None
    assert found.text == (
        f"node gpu-1: the kernel tells of an error: {GPU}: 94, pid=7, Contained: SM (0x1); Xid 94 (memory error "
        "contained in one application), in NVIDIA's catalogue RESTART_APP: restart the application; the node stays "
        "in use"
    )


def test_a_restart_of_the_application_is_told_and_leaves_the_node_in_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = job_from_command_line(["--nproc-per-node", "1", "train.py"], {"HOME": "/nowhere"})
    run = ToldRun(tmp_path, job, children=False)
    node = NodeChecks(run)
    contained = judge(f"{GPU}: 94, pid=7, name=python, Contained: SM (0x1)")
    broken = judge(f"{GPU}: 95, pid=7, name=python, Uncontained: LTC TAG (0x2,0x0)")
    assert contained is not None
    assert broken is not None

    async def after_a_failure(*found: Found) -> str:
        monkeypatch.setattr(node_checks, "run", lambda _: found)
        node.began()
        node.failed()
        assert node._running is not None
        await asyncio.wait([node._running])
        return node.unfit()

    assert asyncio.run(after_a_failure(contained)) == ""
    assert run.said == [contained.text]
    assert asyncio.run(after_a_failure(broken)) == broken.text


def test_broken_hardware_counts_again_where_workers_do_not_last_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = job_from_command_line(["--nproc-per-node", "1", "train.py"], {"HOME": "/nowhere"})
    node = NodeChecks(ToldRun(tmp_path, job, children=False))
    broken = judge(f"{GPU}: 95, pid=7, name=python, Uncontained: LTC TAG (0x2,0x0)")
    assert broken is not None
    now_s = 1000.0
    monkeypatch.setattr(node_checks.time, "monotonic", lambda: now_s)

    async def after_a_failure(*found: Found) -> str:
        node.failed()
        assert node._running is not None
        await asyncio.wait([node._running])
        return node.unfit()

    node.began()
    for found in ((broken,), (), ()):
        monkeypatch.setattr(node_checks, "run", lambda _, found=found: found)
        assert asyncio.run(after_a_failure()) == broken.text
        assert node.is_broken
        now_s += 5
        node.began()
    now_s += 3600
    assert asyncio.run(after_a_failure()) == ""
    assert not node.is_broken
