"""The command line of ``keepstep run``: torchrun's flags, those of keepstep, the script last.

Only words become values here; ``keepstep.launch.command.job`` checks what they mean together.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from keepstep.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class _Flag:
    flags: str  # all spellings, separated by spaces
    text: str
    default: Any = None
    kind: Any = str
    switch: bool = False
    choices: tuple[str, ...] | None = None
    from_environment: bool = True
    metavar: str | None = None

    @property
    def dest(self) -> str:
        return self.flags.split()[-1].removeprefix("--").replace("-", "_")


def _words(text: str) -> list[str]:
    """Words between commas; a doubled comma stands for a comma inside a word."""
    return [word.replace("\0", ",") for word in text.replace(",,", "\0").split(",")]


_SHOWN = 40  # characters of a value in a message
_UNUSED = "has no effect: "  # how the text of a flag begins that only torchrun needs
_GROUPS = {
    "nodes and workers": (
        _Flag("--nnodes", "nodes, or MIN:MAX of them", "1:1", metavar="N"),
        _Flag("--nproc-per-node", "workers on this node: a number, auto, cpu or gpu", "1", metavar="N"),
        _Flag("--node-rank", "rank of this node (static rendezvous)", 0, kind=int, metavar="I"),
        _Flag("--role", "name of the workers' role", "default"),
    ),
    "rendezvous": (
        _Flag("--rdzv-backend", "static or c10d; both meet at the controller", "static"),
        _Flag("--rdzv-endpoint", "where the nodes meet", "", metavar="HOST:PORT"),
        _Flag("--rdzv-id", "name of the job, the same on all nodes", "none"),
        _Flag("--rdzv-conf", "k=v,...: is_host, join_timeout, timeout are used", "", metavar="CONF"),
        _Flag("--standalone", "one node, any free port", switch=True),
        _Flag("--master-addr", "address of node 0 (static rendezvous)", "127.0.0.1", metavar="HOST"),
        _Flag("--master-port", "port on node 0 (static rendezvous)", kind=int, metavar="PORT"),
        _Flag("--local-addr", "address at which the other nodes reach this one", metavar="HOST"),
    ),
    "life": (
        _Flag("--max-restarts", "restarts of all workers before giving up", 0, kind=int, metavar="N"),
        _Flag("--signals-to-handle", "signals that end the job", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        _Flag("--shutdown-timeout", "seconds from the signal to SIGKILL (30)", kind=int, metavar="S"),
        _Flag(
            "--monitor-interval",
            f"{_UNUSED}a worker's death is noticed at once",
            0.1,
            kind=float,
            metavar="S",
        ),
        _Flag(
            "--start-method",
            f"{_UNUSED}workers are started as programs",
            "spawn",
            choices=("spawn", "fork", "forkserver"),
        ),
        _Flag("--event-log-handler", f"{_UNUSED}events are kept in the run folder", "null"),
    ),
    "what to start": (
        _Flag("-m --module", "the script is a module, as in `python -m`", switch=True),
        _Flag("--no-python", "the script is a program; do not put python before it", switch=True),
        _Flag("--run-path", "the script is an absolute path of a Python file", switch=True),
        _Flag("--virtual-local-rank", "LOCAL_RANK is 0, each worker sees its own GPU only", switch=True),
        _Flag(
            "--numa-binding",
            "accepted, not carried out: workers run unbound, which a warning says",
            choices=("node", "socket", "exclusive", "core-complex"),
            from_environment=False,
        ),
    ),
    "logs": (
        _Flag("--log-dir", "folder for logs instead of the run folder", metavar="DIR"),
        _Flag("-r --redirects", "write streams to files: 1 stdout, 2 stderr, 3 both; or RANK:N,...", "0"),
        _Flag("-t --tee", "the same, and to the console too", "0"),
        _Flag("--local-ranks-filter", "local ranks shown on the console", "", metavar="RANKS"),
        _Flag("--duplicate-stdout-filters", "lines with one of these words also go to a file", kind=_words),
        _Flag("--duplicate-stderr-filters", "lines with one of these words also go to a file", kind=_words),
        _Flag("--logs-specs", f"{_UNUSED}logs go to the run folder or --log-dir", from_environment=False),
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse also names the script's arguments as missing, although there need not be any.
        message = message.replace("SCRIPT, ARGUMENTS", "SCRIPT")
        raise UsageError(f"run: {message}; see `keepstep run --help`")


def parser(environ: Mapping[str, str], *, add_help: bool = True) -> argparse.ArgumentParser:
    """The command line's parser; as in torchrun, its flags take defaults from ``PET_<FLAG>`` in ``environ``.

    With ``add_help`` it prints its help, and ends the process, where the command line asks for it.
    """
    result = _Parser(
        add_help=add_help,
        prog="keepstep run",
        usage="keepstep run [torchrun's flags] [own flags] SCRIPT [ARGUMENTS]",
        description="Run SCRIPT on every worker as torchrun does, watch it, and name what slows or stops it.",
        epilog="Exit code: the job's own (128+N when signal N ended it); 2: the command line cannot be used.",
    )
    for title, flags in _GROUPS.items():
        group = result.add_argument_group(title)
        for flag in flags:
            _add(group, flag, environ)
    _add_own(result.add_argument_group("own flags"))
    result.add_argument("training_script", metavar="SCRIPT", help="the script, module or program")
    result.add_argument("training_script_args", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    return result


def _add(group: Any, flag: _Flag, environ: Mapping[str, str]) -> None:
    names = flag.flags.split()
    names += [name.replace("-", "_").replace("__", "--", 1) for name in names if "-" in name[2:]]
    default = flag.default
    if flag.from_environment:
        default = environ.get(f"PET_{flag.dest.upper()}", default)
    if flag.switch:
        group.add_argument(*names, dest=flag.dest, action="store_true", help=flag.text)
        try:
            group.set_defaults(**{flag.dest: bool(int(default or 0))})
        except ValueError:
            raise UsageError(f"PET_{flag.dest.upper()}={default!r}: say 1 or 0") from None
        return
    group.add_argument(
        *names,
        dest=flag.dest,
        default=default,
        type=flag.kind,
        choices=flag.choices,
        metavar=flag.metavar or (None if flag.choices else "X"),
        help=flag.text,
    )


def _add_own(group: Any) -> None:
    group.add_argument("--run-dir", metavar="DIR", help="run folder (default: runs/<time>-<name>)")
    group.add_argument("--name", help="name of the run (default: the script's)")
    group.add_argument("--no-watch", dest="watch", action="store_false", default=None, help="run only")
    text = "check disk, memory, ports, kernel log, versions and clocks of the nodes (default), or not"
    group.add_argument("--check", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = "never hold the job by itself to test devices and links"
    group.add_argument("--no-validate", dest="validate", action="store_false", default=None, help=text)
    text = "a slowdown that lasts: do what pays (auto), only say what would (advise), or nothing (off)"
    group.add_argument("--mitigate", metavar="auto|advise|off", help=text)
    text = (
        "with --max-restarts: end a process that hangs for sure (restart, default), or only say it (report)"
    )
    group.add_argument("--on-hang", metavar="report|restart", help=text)
    text = (
        "a rank whose state has silently turned wrong: say it (report, default), or with --max-restarts have all ranks "
        "go back to when it was right, where three hold copies (restore)"
    )
    group.add_argument("--on-corrupt", metavar="report|restore", help=text)
    text = "how long a process that hangs is left alone (0: by its timeouts and pauses, 10 minutes or so)"
    group.add_argument("--hang-patience", dest="hang_patience_s", type=float, metavar="S", help=text)
    text = "how long a stopped process is left alone (60)"
    group.add_argument("--stopped-patience", dest="stopped_patience_s", type=float, metavar="S", help=text)
    text = "keep what workers write to stderr (default) or also to stdout (all); or off"
    group.add_argument("--keep-words", metavar="off|stderr|all", help=text)
    group.add_argument("--secret-file", metavar="FILE", help="secret shared by the nodes (0600)")
    group.add_argument("--tls-cert", metavar="PEM", help="certificate of this node (mutual TLS)")
    group.add_argument("--tls-key", metavar="PEM", help="its private key")
    group.add_argument("--tls-ca", metavar="PEM", help="authority that signed all nodes' certificates")
    group.add_argument("--controller-listen", metavar="HOST:PORT", help="where the controller listens")
    group.add_argument("--layout", metavar="tpN-dpN-ppN", help="parallel layout, first varies fastest")
    text = "warm standby processes for restarts: N, auto (as many as workers with --max-restarts), 0"
    group.add_argument("--standbys", metavar="N", help=text)
    text = "restarts within an hour by rank, node and in all, and equal failures that end the job"
    group.add_argument("--restart-budget", metavar="rank=5,node=10,hour=30,same=2", help=text)
    text = "with --nnodes MIN:MAX: seconds to wait for a node before going on with fewer (30)"
    group.add_argument("--shrink-after", dest="shrink_after_s", type=float, metavar="S", help=text)
    text = "with several nodes and restarts: another node hosts the controller when its own is lost (default), or not"
    group.add_argument("--elect", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = "at a restart replace only the processes that failed, where the training can go on in the others"
    group.add_argument("--in-place", action="store_true", default=None, help=text)
    text = "folder or URL where checkpoints are kept beyond the run"
    group.add_argument("--checkpoint-dir", metavar="PATH_OR_URL", help=text)
    text = "steps from one to the next there: N, auto (cost model), or 0: as the script asks"
    group.add_argument("--checkpoint-every", metavar="N", help=text)
    text = "newest steps that stay there, older ones are removed (0: none are)"
    group.add_argument("--checkpoint-keep", type=int, metavar="K", help=text)
    text = "nodes that back up each rank's checkpoints in memory (1; 0: none)"
    group.add_argument("--checkpoint-backups", type=int, metavar="K", help=text)
    text = "most that a node sends for backups a second (0: no limit)"
    group.add_argument("--checkpoint-backup-rate", type=float, metavar="BYTES", help=text)
    text = "label shared by nodes that may be lost together, e.g. of the rack; backups go to another"
    group.add_argument("--failure-domain", metavar="LABEL", help=text)
    group.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors and verdicts")
    group.add_argument("-v", "--verbose", action="store_true", help="say what is done")
    group.add_argument("--dry-run", action="store_true", help="print the plan as JSON and exit")


def parse(argv: Sequence[str], environ: Mapping[str, str], *, add_help: bool = True) -> argparse.Namespace:
    """Parse the command line. Attribute ``said`` of the result names what was given, there or as ``PET_<FLAG>``.

    ``add_help``: False where it is another program's command line, and ``-h`` a wrong flag.

    Raises UsageError for an unknown flag, a value that is missing or wrong, or no script.
    """
    made = parser(environ, add_help=add_help)
    given = made.parse_args(list(argv))
    # An attribute that is there already gets no default.
    alone = made.parse_args(list(argv), argparse.Namespace(**dict.fromkeys(vars(given))))
    given.said = frozenset(name for name, value in vars(alone).items() if value is not None) | {
        flag.dest
        for flags in _GROUPS.values()
        for flag in flags
        if flag.from_environment and f"PET_{flag.dest.upper()}" in environ
    }
    return given


def with_variables(error: UsageError, argv: Sequence[str], environ: Mapping[str, str]) -> UsageError:
    """An error about flags that nobody wrote names the variables that have their values."""
    written = {word.partition("=")[0].replace("_", "-") for word in argv}
    flags = [flag for flag in dict.fromkeys(re.findall(r"--[a-z][a-z-]*", str(error))) if flag not in written]
    variables = [f"PET_{flag[2:].upper().replace('-', '_')}" for flag in flags]
    told = [f"{name}={environ[name][:_SHOWN]!r}" for name in variables if name in environ]
    return UsageError(f"{', '.join(told)}: {error}") if told else error


def without_meaning(given: argparse.Namespace) -> list[str]:
    """A sentence for each given flag of torchrun that has no effect."""
    return [
        f"{flag.flags} {flag.text}"
        for flags in _GROUPS.values()
        for flag in flags
        if flag.text.startswith(_UNUSED) and getattr(given, flag.dest) != flag.default
    ]
