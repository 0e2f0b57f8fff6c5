"""``keepstep plan``: what failures cost a job in a day, with keepstep and without."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from keepstep.checkpoint.storage.cost import Costs, best_interval, kept_cost_s, total_cost_s
from keepstep.cli._checkpoint_plan import measured_step, time_text
from keepstep.cli._parsing import Parser, print_json
from keepstep.core.errors import UsageError

_DAY_S = 86_400.0
_RESTART_S_PER_DEVICE = 0.2  # FlashRecovery, table II: 1,115 s at 5,472 devices

_ABOUT = (
    "Say what failures cost in a day, with keepstep and without. The default values are guesses: give yours."
)


def main(argv: Sequence[str]) -> int:
    """Print what failures cost in a day, without keepstep and with it."""
    parser = Parser("plan", _ABOUT)
    text = "a run whose measured step time is taken"
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help=text)
    parser.add_argument(
        "--devices", type=int, default=1024, metavar="N", help="devices of the job (default: %(default)s)"
    )
    text = (
        "hours between failures of the job, per device (default: %(default)g, which 16,384 GPUs had while "
        "Llama 3 was trained: 419 interruptions in 54 days)"
    )
    parser.add_number("--device-mtbf", 50_000.0, text, "HOURS")
    parser.add_number("--failures-per-day", None, "of the whole job, instead of --device-mtbf (m/d)", "N")
    parser.add_number("--step-time", 0.0, "seconds of a training step (τ); default: measured in RUN")
    text = "without keepstep: seconds until a failure is noticed (default: %(default)g, PyTorch's time limit)"
    parser.add_number("--detection", 600.0, text)
    text = "without: seconds to train again (default: 0.2 a device; FlashRecovery, table II)"
    parser.add_number("--restart", None, text)
    text = "without: seconds that a checkpoint stops training (k0; default: %(default)g)"
    parser.add_number("--checkpoint-time", 30.0, text)
    text = "without: seconds between checkpoints (default: the best, t*)"
    parser.add_number("--interval", None, text)
    text = (
        "with keepstep: seconds from a failure to training again (s0'; default: %(default)g); "
        "`keepstep run` prints it after each recovery"
    )
    parser.add_number("--recovery", 30.0, text)
    text = "with: share of a step for watching and for a snapshot of each (default: %(default)g)"
    parser.add_number("--overhead", 0.005, text, "SHARE")
    parser.add_json("print all terms as JSON")
    given = parser.parse(argv)
    terms = _terms(given)
    if given.json:
        print_json(terms)
    else:
        _print(terms)
    return 0


def _terms(given: Namespace) -> dict[str, Any]:
    """What failures cost in a day, without keepstep and with it."""
    devices: int = given.devices
    if devices < 1:
        raise UsageError(f"--devices {devices}: at least 1")
    failures: float = given.failures_per_day
    if given.failures_per_day is None:
        if not given.device_mtbf > 0:
            raise UsageError(f"--device-mtbf {given.device_mtbf:g}: a number of hours above 0")
        failures = devices * 24 / given.device_mtbf
    step_s, source = (given.step_time, "given") if given.step_time else measured_step(given.run)
    restart_s = devices * _RESTART_S_PER_DEVICE if given.restart is None else given.restart
    before = Costs(_DAY_S, failures, given.detection + restart_s, given.checkpoint_time, step_s)
    after = Costs(_DAY_S, failures, given.recovery, given.overhead * step_s, step_s)
    if given.interval is not None and not given.interval >= step_s:
        raise UsageError(f"--interval {given.interval:g}: at least a step, {step_s:g} s")
    interval_s = best_interval(before).steps * step_s if given.interval is None else given.interval
    without = {
        "recovery_s": before.recovery_s,
        "redone_s": interval_s / 2,
        "saving_s": _DAY_S / interval_s * given.checkpoint_time,
        "lost_s": min(_DAY_S, total_cost_s(before, interval_s / step_s)),
    }
    kept = {
        "recovery_s": given.recovery,
        "redone_s": step_s,
        "saving_s": given.overhead * _DAY_S,
        "lost_s": min(_DAY_S, kept_cost_s(after)),
    }
    return {
        "devices": devices,
        "failures_per_day": failures,
        "step_s": step_s,
        "step_source": source,
        "interval_s": interval_s,
        "without": without,
        "with": kept,
        "saved_device_hours": (without["lost_s"] - kept["lost_s"]) * devices / 3600,
    }


def _print(terms: dict[str, Any]) -> None:
    print(
        f"{terms['devices']} devices, {terms['failures_per_day']:.3g} failures a day, "
        f"steps of {time_text(terms['step_s'])} ({terms['step_source']})\n"
    )
    rows = [
        ("a failure: training again after", "recovery_s", ""),
        ("a failure: work done twice", "redone_s", f"half of {time_text(terms['interval_s'])}; one step"),
        ("a day: checkpoints, watching", "saving_s", ""),
        ("a day: lost in all", "lost_s", ""),
    ]
    print(f"{'':<34}{'without':>10}  {'with keepstep':>13}")
    for name, key, note in rows:
        without, kept = terms["without"][key], terms["with"][key]
        print(f"{name:<34}{time_text(without):>10}  {time_text(kept):>13}  {note}".rstrip())
    without, kept = (terms[side]["lost_s"] / _DAY_S for side in ("without", "with"))
    print(f"{'a day: share of it':<34}{without:>10.1%}  {kept:>13.1%}")
    print(f"\nsaved: {terms['saved_device_hours']:,.0f} device hours a day")
