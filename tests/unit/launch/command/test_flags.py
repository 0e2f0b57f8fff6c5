"""torchrun's command lines must mean here what they mean there; its own parser is the reference."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.core.errors import UsageError
from keepstep.launch.command import flags

run = pytest.importorskip("torch.distributed.run", reason="needs torch to compare with torchrun")

WORD = st.sampled_from(["1", "4", "0:3,1:1", "auto", "host:29500", "a=b,c=d", "x", "apple,or,,ange", "-1"])
VALUED = {
    "nnodes": st.sampled_from(["1", "2:4", "8"]),
    "nproc-per-node": st.sampled_from(["1", "8", "auto", "cpu"]),
    "rdzv-backend": st.sampled_from(["static", "c10d"]),
    "rdzv-endpoint": st.sampled_from(["node0", "node0:29400", "[::1]:1"]),
    "rdzv-id": WORD,
    "rdzv-conf": st.just("join_timeout=5,is_host=1"),
    "max-restarts": st.integers(0, 9).map(str),
    "monitor-interval": st.just("0.5"),
    "start-method": st.sampled_from(["spawn", "fork", "forkserver"]),
    "event-log-handler": WORD,
    "role": st.just("trainer"),
    "log-dir": st.just("/tmp/logs"),
    "redirects": st.sampled_from(["0", "3", "0:1,1:2"]),
    "tee": st.sampled_from(["0", "3", "0:1,1:2"]),
    "local-ranks-filter": st.just("0,1"),
    "duplicate-stdout-filters": st.just("apple,or,,ange"),
    "duplicate-stderr-filters": st.just("x"),
    "node-rank": st.integers(0, 9).map(str),
    "master-addr": st.sampled_from(["127.0.0.1", "node0"]),
    "master-port": st.integers(1, 65535).map(str),
    "local-addr": st.just("10.0.0.1"),
    "logs-specs": st.just("mine"),
    "numa-binding": st.sampled_from(["node", "socket", "exclusive", "core-complex"]),
    "signals-to-handle": st.just("SIGTERM,SIGUSR1"),
    "shutdown-timeout": st.integers(0, 90).map(str),
}
SWITCHES = ["standalone", "module", "no-python", "run-path", "virtual-local-rank"]
SCRIPT = st.lists(
    st.sampled_from(["--nnodes", "9", "-q", "--", "-m", "--help", "${local_rank}", "--run-dir=x", "a b"]),
    max_size=5,
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    words: list[str] = []
    for name in draw(st.lists(st.sampled_from(sorted(VALUED)), unique=True, max_size=6)):
        value = draw(VALUED[name])
        spelt = f"--{name.replace('-', '_') if draw(st.booleans()) else name}"
        words += [f"{spelt}={value}"] if draw(st.booleans()) or value.startswith("-") else [spelt, value]
    words += [
        f"--{name.replace('-', '_') if draw(st.booleans()) else name}"
        for name in draw(st.lists(st.sampled_from(SWITCHES), unique=True, max_size=3))
    ]
    return [*words, "train.py", *draw(SCRIPT)]


def as_torchrun(words: list[str]) -> dict[str, object]:
    return vars(run.parse_args(words))


def ours(words: list[str], environ: dict[str, str]) -> dict[str, object]:
    parsed = vars(flags.parse(words, environ))
    parsed["duplicate_stdout_filters"] = parsed["duplicate_stdout_filters"] or []
    parsed["duplicate_stderr_filters"] = parsed["duplicate_stderr_filters"] or []
    return parsed


@given(command_lines())
@settings(max_examples=many(300), deadline=None)
def test_every_torchrun_command_line_means_the_same(words: list[str]) -> None:
    theirs = as_torchrun(words)
    mine = ours(words, {})
    assert {name: mine[name] for name in theirs} == theirs


def test_every_flag_of_torchrun_is_known() -> None:
    here = {name for action in flags.parser({})._actions for name in action.option_strings}
    there = {name for action in run.get_args_parser()._actions for name in action.option_strings}
    assert there - here == set()


def test_own_flags_clash_with_none_of_torchruns() -> None:
    there = {name for action in run.get_args_parser()._actions for name in action.option_strings}
    assert there & {"--run-dir", "--name", "--no-watch", "--secret-file", "-q", "-v", "--dry-run"} == set()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PET_NNODES", "2"),
        ("PET_NPROC_PER_NODE", "4"),
        ("PET_STANDALONE", "1"),
        ("PET_STANDALONE", "0"),
        ("PET_MASTER_PORT", "1234"),
        ("PET_MODULE", "1"),
        ("PET_TEE", "3"),
        ("PET_DUPLICATE_STDOUT_FILTERS", "a,b"),
        ("PET_NUMA_BINDING", "node"),
    ],
)
def test_defaults_from_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    theirs = as_torchrun(["train.py"])
    mine = ours(["train.py"], {variable: value})
    assert {name: mine[name] for name in theirs} == theirs


def test_a_flag_beats_the_environment() -> None:
    assert flags.parse(["--nnodes", "3", "t.py"], {"PET_NNODES": "2"}).nnodes == "3"


@pytest.mark.parametrize(
    "words", [["--bogus", "t.py"], [], ["--max-restarts", "x", "t.py"], ["--start-method=y", "t"]]
)
def test_what_cannot_be_used_is_one_line(words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        flags.parse(words, {})
    assert "\n" not in str(raised.value)
    assert "keepstep run --help" in str(raised.value)


def test_flags_without_meaning_are_named_when_given() -> None:
    said = flags.without_meaning(flags.parse(["--monitor-interval", "5", "--start_method=fork", "t.py"], {}))
    assert [line.split()[0] for line in said] == ["--monitor-interval", "--start-method"]
    assert flags.without_meaning(flags.parse(["t.py"], {})) == []


def test_neither_torch_numpy_nor_msgspec_is_imported() -> None:
    code = (
        "import sys, contextlib, io\n"
        "from keepstep.cli import main\n"
        "tls = [word for name in ('cert', 'key', 'ca') for word in (f'--tls-{name}', sys.argv[1])]\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    assert main(['run', '--dry-run', *tls, 't.py']) == 0\n"
        "import keepstep.launch.launcher\n"
        "print([m for m in ('torch', 'numpy', 'msgspec') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, __file__], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
