"""What the controller needs, what a process is given, and what is said when that does not fit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from keepstep.core import descriptors


@pytest.mark.parametrize(
    ("nodes", "hard", "lacks"), [(1, 66, False), (1, 65, True), (480, 1024, False), (481, 1024, True)]
)
def test_two_connections_of_each_node_and_some_more(nodes: int, hard: int, lacks: bool) -> None:
    assert bool(descriptors.lack(nodes, hard)) == lacks


def test_the_numbers_are_said_and_what_to_do() -> None:
    assert descriptors.lack(2000, 1024) == (
        "2,000 nodes need 4,064 descriptors; the hard limit of this process is 1,024: "
        "raise it with ulimit -Hn or LimitNOFILE="
    )


def test_a_raised_limit_can_be_taken_back() -> None:
    code = (
        "import resource; from keepstep.core import descriptors as d; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300)); "
        "print(d.raise_limit(), d.soft_limit(), d.hard_limit()); "
        "d.give_limit(200); print(d.soft_limit(), d.hard_limit()); "
        "d.give_limit(400); print(d.soft_limit(), d.hard_limit())"  # more than is allowed changes nothing
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["200 300 300", "200 300", "200 300", ""]


def test_those_that_are_open_are_counted() -> None:
    before = descriptors.open_now()
    ends = os.pipe()
    assert descriptors.open_now() == before + 2
    for end in ends:
        os.close(end)
