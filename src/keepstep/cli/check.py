"""``keepstep check``: whether this node, or all nodes of a job to be, are fit to train; one row a node."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepstep.cli._parsing import Parser, number, print_json
from keepstep.core.config import config_path, resolve
from keepstep.core.node_row import NodeRow
from keepstep.launch.command.run_settings import SETTINGS

_ABOUT = (
    "Check this node, or with --nnodes all nodes of a job to be. Exit code 0: fit, 1: a node is unfit and is named, "
    "2: the check could not be done."
)
_MOST_BURN_IN_S = 24 * 3600.0
_MOST_PATHS = 16


def main(argv: Sequence[str]) -> int:
    """Check; returns 1 when a node is unfit. Raises UsageError, and RunError where nodes cannot meet."""
    given = _parsed(argv)
    environ = dict(os.environ)
    value = {name: one.value for name, one in _settings(environ, given).items()}
    request = _request(given, value)
    if given.nnodes > 1:
        from keepstep.launch.check.check_host import Conclusion
        from keepstep.launch.check.several import check_nodes, meeting_from

        def show(found: Conclusion) -> None:
            _print(found.rows, found.broken, found.slow, as_json=given.json)

        return check_nodes(meeting_from(given, value, environ), request, environ, show)
    from keepstep.launch.check.row_of_node import row_of_node
    from keepstep.validate.judge_nodes import compared

    rows = compared([row_of_node(request, environ, time.monotonic())])
    _print(rows, as_json=given.json)
    return 1 if rows[0].unfit else 0


def _parsed(argv: Sequence[str]) -> Any:
    parser = Parser("check", _ABOUT)
    text = (
        "keep all GPUs (the CPU, where there is none) busy for so many seconds and compare what they compute"
    )
    seconds = number(float, 0.0, _MOST_BURN_IN_S)
    parser.add_argument("--burn-in", type=seconds, default=0.0, metavar="S", help=text)
    text = (
        "a folder or file of data or checkpoints: read and, unless :ro, written where that is allowed; "
        ":rw has to be writable; may be given several times"
    )
    parser.add_argument("--path", action="append", default=[], metavar="PATH[:ro|:rw]", help=text)
    parser.add_json("print the rows as JSON")
    group = parser.add_argument_group("several nodes: start it on each, with the same flags")
    group.add_argument(
        "--nnodes", type=number(int, 1, 4096), default=1, metavar="N", help="number of nodes (1)"
    )
    text = "where they meet: a port of one of them, which prints the table"
    group.add_argument("--rdzv-endpoint", default="", metavar="HOST:PORT", help=text)
    text = "name of the check, the same on all nodes"
    group.add_argument("--rdzv-id", default="none", metavar="ID", help=text)
    text = "k=v,...: is_host, join_timeout, timeout are used"
    group.add_argument("--rdzv-conf", default="", metavar="CONF", help=text)
    text = "address at which the other nodes reach this one"
    group.add_argument("--local-addr", default="", metavar="HOST", help=text)
    text = "secret shared by the nodes (0600)"
    group.add_argument("--secret-file", default=None, metavar="FILE", help=text)
    return parser.parse(argv)


def _settings(environ: Mapping[str, str], given: Any) -> Any:
    flags = {"secret_file": given.secret_file}
    return resolve(SETTINGS, environ=environ, flags=flags, path=config_path(environ))


def _request(given: Any, value: Mapping[str, Any]) -> Any:
    from keepstep.core.errors import UsageError
    from keepstep.launch.check.row_of_node import Request
    from keepstep.launch.node.checks.paths import configured_paths, wanted_path

    # Those of the settings are checked as before a job; the command line adds to them.
    wanted = {one.path: one for one in configured_paths(value["checkpoint_dir"], value["dataset_paths"])}
    wanted |= {one.path: one for one in map(wanted_path, given.path)}
    if len(wanted) > _MOST_PATHS:
        raise UsageError(f"check: {len(wanted)} paths; give at most {_MOST_PATHS}")
    return Request(
        value["node_name"] or os.uname().nodename,
        Path(value["runs_dir"]).absolute(),
        tuple(wanted.values()),
        given.burn_in,
        *((value["kernel_log"],) if value["kernel_log"] else ()),
    )


def _print(
    rows: Sequence[NodeRow], broken: Sequence[str] = (), slow: Sequence[str] = (), *, as_json: bool
) -> None:
    if as_json:
        print_json({"nodes": rows, "broken_links": broken, "slow_links": slow})
    else:
        from keepstep.report.node_table import table

        print(table(rows, broken, slow))
    sys.stdout.flush()
