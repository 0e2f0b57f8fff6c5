"""``python -m keepstep.control``: the controller as a program, which a launcher starts."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path

from keepstep import wire
from keepstep.control.control_server import ControlServer, Options
from keepstep.control.settings import Settings
from keepstep.core.budgets import limits_of
from keepstep.core.descriptors import raise_limit
from keepstep.core.errors import KeepstepError
from keepstep.core.log_lines import log_into
from keepstep.core.own_folders import make_folder

_PR_SET_PDEATHSIG = 1


def parse(argv: list[str]) -> Options:
    """The command line; what is not given has the default of `Settings` or `Options`.

    Raises UsageError where an address, a budget or the paths for TLS cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="python -m keepstep.control",
        description="The controller of one run.",
        argument_default=argparse.SUPPRESS,
    )
    flag = parser.add_argument
    flag("--run-dir", type=Path, required=True, help="the run's folder")
    flag("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="this address and no other")
    flag("--secret-file", type=Path, required=True, help="the run's secret, mode 0600")
    flag("--run-id", metavar="ID", help="no program of another run is let in")
    flag("--nodes", type=int, help="launchers to wait for")
    flag("--join-timeout", dest="join_s", type=float, metavar="SECONDS")
    text = "for a spare where the job may go on with fewer nodes"
    flag("--shrink-after", dest="shrink_s", type=float, metavar="SECONDS", help=text)
    text = "for a launcher to end its workers"
    flag("--halt-timeout", dest="halt_s", type=float, metavar="SECONDS", help=text)
    flag("--layout", help="declared parallel layout, e.g. tp2-dp4-pp2")
    flag("--backups", type=_count, metavar="K", help="nodes that back up each rank's checkpoints")
    flag("--restart-budget", type=limits_of, metavar="NAME=N,...", help="restarts within an hour")
    flag("--no-validate", dest="validate", action="store_false", help="hold the job only when asked to")
    flag("--mitigate", choices=("off", "advise", "auto"), help="slowdowns that last")
    flag("--restart-hangs", action="store_true", help="have processes ended that hang for sure")
    text = "have all ranks go back where it is sure whose state is wrong"
    flag("--restore-corrupt", action="store_true", help=text)
    text = "how long a process that hangs is left alone; 0: by its timeouts and pauses"
    flag("--hang-patience", dest="hang_patience_s", type=float, metavar="SECONDS", help=text)
    flag("--stopped-patience", dest="stopped_patience_s", type=float, metavar="SECONDS", help="a stopped one")
    flag("--max-restarts", type=_count, metavar="N", help="of the job")
    flag("--seat", type=int, metavar="TOKEN", help="of the launcher beside it")
    flag("--term", type=int, metavar="N", help="in which that was elected")
    flag("--council", type=Path, metavar="FILE", help="who elects, and the rank table")
    for name in ("cert", "key", "ca"):
        flag(f"--tls-{name}", default=None)
    text = "accept nodes whose addresses are rewritten on the way (NAT): weaker against relays"
    flag("--allow-translated-addresses", dest="check_addresses", action="store_false", help=text)
    text = "do not end with the process that started it"
    flag("--no-parent", dest="watch_parent", action="store_false", help=text)
    given = vars(parser.parse_args(argv))
    host, port = wire.parse_address(given.pop("listen"))
    tls = wire.TlsPaths.of(*(given.pop(f"tls_{name}") for name in ("cert", "key", "ca")))
    settings = Settings(**{one.name: given.pop(one.name) for one in fields(Settings) if one.name in given})
    given["run_dir"] = given["run_dir"].resolve()
    return Options(host=host, port=port, settings=settings, tls=tls, **given)


def _count(text: str) -> int:
    return max(0, int(text))


def collect_rarely() -> None:
    """Have garbage collected rarely: a search for cycles among the state of 100,000 ranks finds none and costs time."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def main(argv: list[str]) -> int:
    """Run the controller until the job is over or SIGTERM comes (0); 2 when it cannot start."""
    parent = os.getppid()
    try:
        options = parse(argv)
        make_folder(options.run_dir)
        log_into(options.run_dir / "controller.log", "%(asctime)s %(levelname)s %(name)s: %(message)s")
        if options.watch_parent:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                return 0

        collect_rarely()
        raise_limit()

        return wire.run(ControlServer(options, parent=parent).main())
    except KeepstepError as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
