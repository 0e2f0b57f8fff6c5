"""What others said takes one line of a log, whatever is in it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.core.log_lines import LONGEST, OneLineFormatter, one_line

FORM = "%(levelname)s %(message)s"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("gpu-7: Überlauf → 3", "gpu-7: Überlauf → 3"),
        ("a\nb\r\nc", "a\\nb\\r\\nc"),
        ("\x1b[2J\x07\x9b", "\\x1b[2J\\x07\\x9b"),
        ("a\u202eb\u2028c\ud800", "a\\u202eb\\u2028c\\ud800"),
    ],
)
def test_what_cannot_be_printed_is_escaped(said: str, shown: str) -> None:
    assert one_line(said) == shown
    assert shown.isprintable()


def test_a_long_text_is_cut() -> None:
    assert one_line("x" * LONGEST) == "x" * LONGEST
    assert one_line("\n" * 1_000_000) == "\\n" * LONGEST + "… (1000000 characters)"


def test_a_record_is_one_line() -> None:
    record = logging.LogRecord("x", logging.INFO, "x", 1, "refused %s", ("n\nINFO all is well",), None)
    assert OneLineFormatter(FORM).format(record) == "INFO refused n\\nINFO all is well"


def test_no_line_of_a_traceback_looks_like_a_record() -> None:
    try:
        raise ValueError("boom\nINFO all is well\x1b[2J")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "x", 1, "failed", (), sys.exc_info())
    first, *rest = OneLineFormatter(FORM).format(record).split("\n")
    assert first == "ERROR failed"
    assert rest[-2:] == ["  | ValueError: boom", "  | INFO all is well\\x1b[2J"]
    assert all(line.startswith("  | ") for line in rest)


def test_a_program_logs_into_its_file(tmp_path: Path) -> None:
    script = (
        "import logging, sys; from pathlib import Path; from keepstep.core.log_lines import log_into\n"
        f"log_into(Path(sys.argv[1]), {FORM!r})\n"
        "logging.getLogger('keepstep.wire').warning('no connection: %s', 'gone\\nINFO all is well \\ud800')\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "agent.log")], check=True)
    line = "WARNING no connection: gone\\nINFO all is well \\ud800\n"
    assert (tmp_path / "agent.log").read_text() == 2 * line


def test_what_a_full_disk_does_not_take_is_counted(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk: it is lifted after the third record."""
    script = (
        "import logging, resource, signal, sys; from pathlib import Path\n"
        "from keepstep.core.log_lines import log_into\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"log_into(Path(sys.argv[1]), {FORM!r})\n"
        "for number in range(5):\n"
        "    most = 20 if number < 3 else 1_000_000\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (most, -1))\n"
        "    logging.getLogger('x').warning('record %d', number)\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "nodes" / "agent.log")]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    assert (tmp_path / "nodes" / "agent.log").read_text().splitlines() == [
        "WARNING record 0",
        "WAR",
        "(2 records are missing here: File too large)",
        "WARNING record 3",
        "WARNING record 4",
    ]
