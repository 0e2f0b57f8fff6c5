"""The command lines of the verbs: help, flags and arguments in any order, and usage errors in one line."""

from __future__ import annotations

import pytest

from keepstep.cli import VERBS, main

LEAVES = [[verb] for verb in VERBS if verb not in ("checkpoint", "config")]
LEAVES += [["checkpoint", verb] for verb in ("plan", "list", "verify", "export", "prune")]
LEAVES += [["config", "show"]]


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_verb_has_help(words: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, flag]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"usage: keepstep {' '.join(words)} ")
    assert told.err == ""


@pytest.mark.parametrize("words", [[], ["checkpoint"], ["config"]], ids=" ".join)
def test_help_on_verbs_goes_to_stdout_when_asked_for_and_else_to_stderr(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"]) == 0
    asked = capsys.readouterr()
    assert main(words) == 2
    unasked = capsys.readouterr()
    assert (asked.out, asked.err) == (unasked.err, unasked.out)
    assert asked.err == ""
    assert asked.out.startswith(f"usage: {' '.join(['keepstep', *words])} VERB ...\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("reprt", "reprt: there is no such verb (did you mean report or export?); see `keepstep --help`"),
        ("--nope", "--nope: there is no such flag; see `keepstep --help`"),
        ("config sho", "sho: there is no such verb (did you mean show?); see `keepstep config --help`"),
        ("checkpoint x", "x: there is no such verb; see `keepstep checkpoint --help`"),
        ("report", "report: the following arguments are required: RUN; see `keepstep report --help`"),
        ("report /no x", "report: argument INCIDENT: invalid int value: 'x'; see `keepstep report --help`"),
        ("report /no --jso", "report: unrecognized arguments: --jso; see `keepstep report --help`"),
        (
            "export /no",
            "export: the following arguments are required: -o/--output; see `keepstep export --help`",
        ),
        ("validate /no --hold 1", "validate: argument --hold: 1 is not between 5 and 20; see `keepstep"),
        ("validate /no --hold x", "validate: argument --hold: invalid float value: 'x'; see `keepstep"),
        ("validate /no --hold nan", "validate: argument --hold: nan is not between 5 and 20; see `keepstep"),
        ("ctl /no halt", "ctl: argument VERB: invalid choice: 'halt' (choose from"),
        ("ctl /no exchange a", "keepstep ctl /no exchange: give two nodes, by name or node rank"),
        ("ctl /no stop a", "keepstep ctl /no stop: give no node"),
        ("plan --step-time", "plan: argument --step-time: expected one argument; see `keepstep plan --help`"),
        ("checkpoint prune /no --keep 0", "checkpoint prune: argument --keep: 0 is less than 1; see"),
        ("checkpoint prune /no --keep x", "checkpoint prune: argument --keep: invalid int value: 'x'; see"),
        ("checkpoint prune /no", "checkpoint prune: the following arguments are required: --keep; see"),
        ("checkpoint verify /no --step x", "checkpoint verify: argument --step: invalid int value: 'x'; see"),
    ],
)
def test_usage_errors_are_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"keepstep: {said}")
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "report --json /no 3",
        "report /no --json 3",
        "report /no 3 --json",
        "report -- /no",
        "report /no -- 3",
        "status /no --json",
        "ctl --timeout 3 /no status",
        "ctl /no --timeout 3 status",
        "export -o x.json /no",
        "export /no -ox.json",
        "export /no --output=x.json",
        "plan /no --json",
        "plan --json /no",
        "validate --ranks 0-1 /no --hold 20",
    ],
)
def test_flags_and_arguments_come_in_any_order(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith("keepstep: /no: no run folder")


def test_nodes_may_follow_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ctl", "/no", "exchange", "a", "--now", "b"]) == 2
    assert "no --now, nodes take over a step that is sealed" in capsys.readouterr().err


def test_a_run_may_be_named_like_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--", "-x"]) == 2
    assert capsys.readouterr().err.startswith("keepstep: -x: no run folder")


def test_what_others_named_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no\nverb\x1b[31m"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("keepstep: no\\nverb\\x1b[31m: there is no such verb")
    assert told.count("\n") == 1
