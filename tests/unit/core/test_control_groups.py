"""Which folders account for a process: version 1 and 2, nested, in containers, and where not all can be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.core.control_groups import folders

V2 = "30 24 0:26 {top} {mount} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {top} {mount} rw,relatime - cgroup cgroup rw,memory"


def tree(folder: Path, groups: list[str], *mounts: str) -> tuple[tuple[str, ...], ...]:
    """What is found for these lines of ``cgroup`` and ``mountinfo``, as seen below the folder."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text("".join(f"{line}\n" for line in groups))
    (folder / "proc" / "self" / "mountinfo").write_text(
        "".join(f"{line}\n" for line in ("22 1 8:1 / / rw - ext4 /dev/sda1 rw", *mounts))
    )
    found = folders("memory", proc=folder / "proc", root=folder)
    return tuple(tuple(f"/{one.relative_to(folder)}" for one in upwards) for upwards in found)


@pytest.mark.parametrize(
    ("groups", "mounts", "expected"),
    [
        pytest.param(
            ["0::/slurm/job_7/step_0"],
            [V2.format(top="/", mount="/cg")],
            [["/cg/slurm/job_7/step_0", "/cg/slurm/job_7", "/cg/slurm", "/cg"]],
            id="version 2",
        ),
        pytest.param(
            ["9:name=systemd:/", "4:cpu,memory:/slurm/uid_0", "1:cpuset:/other", "0::/"],
            ["31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw", V1.format(top="/", mount="/sys/fs/cgroup/memory")],
            [["/sys/fs/cgroup/memory/slurm/uid_0", "/sys/fs/cgroup/memory/slurm", "/sys/fs/cgroup/memory"]],
            id="version 1",
        ),
        pytest.param(
            ["4:memory:/a", "0::/b"],
            [V1.format(top="/", mount="/cg/memory"), V2.format(top="/", mount="/cg/unified")],
            [["/cg/memory/a", "/cg/memory"], ["/cg/unified/b", "/cg/unified"]],
            id="hybrid",
        ),
        pytest.param(
            ["4:memory:/docker/abc/inner"],
            [V1.format(top="/docker/abc", mount="/sys/fs/cgroup/memory")],
            [["/sys/fs/cgroup/memory/inner", "/sys/fs/cgroup/memory"]],
            id="a container sees a part",
        ),
        pytest.param(
            ["4:memory:/docker/abcdef"],
            [V1.format(top="/docker/abc", mount="/sys/fs/cgroup/memory")],
            [["/sys/fs/cgroup/memory"]],
            id="a name that only begins alike",
        ),
        pytest.param(
            ["0::/"],
            [V2.format(top="/", mount="/sys/fs/cgroup")],
            [["/sys/fs/cgroup"]],
            id="a namespace of its own",
        ),
        pytest.param(
            ["0::/"],
            [V2.format(top="/../..", mount="/sys/fs/cgroup")],
            [["/sys/fs/cgroup"]],
            id="mounted outside of the namespace",
        ),
        pytest.param(
            ["0::/../sibling"],
            [V2.format(top="/", mount="/sys/fs/cgroup")],
            [["/sys/fs/cgroup"]],
            id="moved out of the namespace",
        ),
        pytest.param(
            ["0::/pod/abc"],
            [
                V2.format(top="/pod/abc", mount="/sys/fs/cgroup"),
                V2.format(top="/", mount="/host/sys/fs/cgroup"),
                V2.format(top="/other", mount="/elsewhere"),
            ],
            [["/sys/fs/cgroup"], ["/host/sys/fs/cgroup/pod/abc", "/host/sys/fs/cgroup/pod", "/host/sys/fs/cgroup"]],
            id="the host's tree is mounted, too",
        ),
        pytest.param(
            ["0::/with space:and colon"],
            [V2.format(top="/", mount=r"/a\040b")],
            [["/a b/with space:and colon", "/a b"]],
            id="escaped names",
        ),
        pytest.param(["0::/x", "nonsense"], [], [], id="nothing is mounted"),
    ],
)  # fmt: skip
def test_the_folders_from_the_inmost_outwards(
    tmp_path: Path, groups: list[str], mounts: list[str], expected: list[list[str]]
) -> None:
    assert [list(upwards) for upwards in tree(tmp_path, groups, *mounts)] == expected


def test_a_group_that_no_mount_names_is_taken_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup/memory/b/c").mkdir(parents=True)
    found = tree(tmp_path, ["4:memory:/b/c"], V1.format(top="/a", mount="/sys/fs/cgroup/memory"))
    assert found == (("/sys/fs/cgroup/memory/b/c", "/sys/fs/cgroup/memory/b", "/sys/fs/cgroup/memory"),)


def test_without_proc_nothing_is_found(tmp_path: Path) -> None:
    assert folders("memory", proc=tmp_path, root=tmp_path) == ()
    assert folders("memory", 9, proc=tmp_path, root=tmp_path) == ()
