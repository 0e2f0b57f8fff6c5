"""How training frameworks print an iteration and the time, or the speed, of it: a line to a reading."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Format = Literal["Megatron", "NeMo", "DeepSpeed", "DeepSpeed pipeline", "torchtitan", "progress bar"]

FORMATS: tuple[Format, ...] = (
    "Megatron", "NeMo", "DeepSpeed pipeline", "DeepSpeed", "torchtitan", "progress bar",
)  # fmt: skip
"""The best first: a job may print several."""

SPEEDS: dict[Format, str] = {"DeepSpeed": "samples", "torchtitan": "tokens"}
"""What these formats count a second; they print no times."""

MARKS = (b"per iter", b"per_iter", b"per step", b"step_timing in s", b"SamplesPerSec", b"iter time",
         b"tps:", b"wps:", b"it/s", b"s/it", b"per global batch")  # fmt: skip
"""One of these is in every line that may be a reading."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a progress bar of tqdm says: a step of so many, the time since it began, and its own idea of a step."""

    total: int  # 0: it says none
    epoch: int
    elapsed_s: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One iteration.

    ``seconds`` is the inverse of the speed for formats in `SPEEDS`. ``batch``, and the samples ``consumed`` since the
    training began, are 0 if not told.
    """

    format: Format
    number: int
    seconds: float
    batch: int = 0
    bar: Bar | None = None
    consumed: int = 0


_MOST_STEPS = 1e12
_NUMBER = r"(\d[\d,]{0,20}(?:\.\d{0,20})?(?:[eE][+-]?\d{1,3})?)"
_IS = r"\s{0,4}[:=]\s{0,12}"

_ELAPSED = re.compile(
    r"elapsed[ _]time[ _]per[ _](?:iteration|iter|step|global[ _]batch)[\s_]{0,4}\(?\s{0,4}"
    rf"(?P<unit>ms|msecs?|milliseconds?|s|secs?|seconds?)?\s{{0,4}}\)?{_IS}{_NUMBER}(?P<times>[KM](?![A-Za-z]))?",
    re.IGNORECASE,
)
_ITERATION = re.compile(
    r"\b(?:iteration|iter|step|global batch)\s{0,4}[:=]?\s{0,12}(\d{1,12})\b", re.IGNORECASE
)
_BATCH = re.compile(
    rf"global[ _]batch[ _]size{_IS}(\d{{1,12}}(?:\.\d{{1,12}})?)(K(?![A-Za-z]))?", re.IGNORECASE
)
_CONSUMED = re.compile(rf"\bconsumed[ _](?:train[ _])?samples{_IS}(\d{{1,15}})\b(?![.eE])", re.IGNORECASE)

_NEMO_TIME = re.compile(rf"train_step_timing in s\"?{_IS}{_NUMBER}")
_NEMO_STEP = re.compile(rf"global_step\"?{_IS}{_NUMBER}")
_NEMO_OTHER_STEP = re.compile(r"\b(\d{1,12})/\d{1,12}\b|\"step\": {0,4}(\d{1,12})")

_DEEPSPEED_STEP = re.compile(r"\bglobal_step=(\d{1,12})")
_DEEPSPEED_SPEED = re.compile(rf"\bCurrSamplesPerSec={_NUMBER}")
_DEEPSPEED_PIPELINE = re.compile(
    rf"\bsteps: {{0,8}}(\d{{1,12}})\b.{{0,200}}?\biter time \(s\): {{0,8}}{_NUMBER}"
)

_TITAN_STEP = re.compile(r"\bstep: {0,12}(\d{1,12})\b")
_TITAN_SPEED = re.compile(rf"\b(?:tps|wps): {{0,12}}{_NUMBER}")

_CLOCK = r"(\d{1,3}(?::\d\d){1,2})"
_RATE = r"(\d{1,9}(?:\.\d{0,9})?) ?(it/s|s/it)"
_BAR = re.compile(
    rf"\b(\d{{1,12}})(?:/(\d{{1,12}})|it) {{0,2}}(?:\[{_CLOCK}(?:<[^,\]]{{0,24}})?, {{0,4}}|"
    rf"{_CLOCK} • \S{{1,12}} ){_RATE}"
)
_EPOCH = re.compile(r"\bEpoch {0,2}(\d{1,9})\b")
_OTHER_BARS = re.compile(
    r"valid|sanity|test|predict|eval|infer|generat|download|fetch|load|shard|map|token|filter|sav|warm|calib",
    re.IGNORECASE,
)
_TITLE_WITHIN = 200  # characters before a bar's numbers that hold its title


def reading(text: str) -> Reading | None:
    """What a line says of an iteration; None when it is no such line, or its numbers are no times."""
    found = (
        _megatron(text)
        or _nemo(text)
        or _deepspeed_pipeline(text)
        or _deepspeed(text)
        or _torchtitan(text)
        or _progress_bar(text)
    )
    return found if found is not None and 0 < found.seconds < 1e9 else None


def _megatron(text: str) -> Reading | None:
    """``iteration 7/ 900 | … elapsed time per iteration (ms): 1049.9/1052.0 | …``: forks put a mean behind it."""
    time = _ELAPSED.search(text)
    if time is None:
        return None
    numbers = _ITERATION.search(text, 0, time.start()) or _ITERATION.search(text, time.end())
    if numbers is None:
        return None
    in_seconds = (time["unit"] or "ms").lower().startswith("s")
    scale = (1.0 if in_seconds else 1e-3) * {"K": 1e3, "M": 1e6}.get((time["times"] or "").upper(), 1.0)
    consumed = _CONSUMED.search(text)
    return Reading(
        "Megatron",
        int(numbers[1]),
        _value(time[2]) * scale,
        _batch(text),
        consumed=int(consumed[1]) if consumed else 0,
    )


def _nemo(text: str) -> Reading | None:
    """``… global_step: 7 | … | train_step_timing in s: 2.5``, in a line of its own or in a progress bar."""
    time = _NEMO_TIME.search(text)
    if time is None:
        return None
    step = _NEMO_STEP.search(text)
    # A bar prints three digits, 1.23e+4; its own count is exact.
    other = _NEMO_OTHER_STEP.search(text) if step is None or "e" in step[1].lower() else None
    if other is not None:
        return Reading("NeMo", int(other[1] or other[2]), _value(time[1]), _batch(text))
    if step is None or not _value(step[1]) < _MOST_STEPS:
        return None
    return Reading("NeMo", int(_value(step[1])), _value(time[1]), _batch(text))


def _deepspeed_pipeline(text: str) -> Reading | None:
    found = _DEEPSPEED_PIPELINE.search(text) if "iter time" in text else None
    return found and Reading("DeepSpeed pipeline", int(found[1]), _value(found[2]))


def _deepspeed(text: str) -> Reading | None:
    speed = _DEEPSPEED_SPEED.search(text)
    step = _DEEPSPEED_STEP.search(text) if speed else None
    return step and speed and Reading("DeepSpeed", int(step[1]), _inverse(_value(speed[1])))


def _torchtitan(text: str) -> Reading | None:
    speed = _TITAN_SPEED.search(text)
    step = _TITAN_STEP.search(text, 0, speed.start()) if speed else None
    return step and speed and Reading("torchtitan", int(step[1]), _inverse(_value(speed[1])))


def _progress_bar(text: str) -> Reading | None:
    """``Epoch 0:  22%|██▏  | 4/18 [00:17<01:02,  4.47s/it, …]`` as of Lightning and Transformers."""
    found = _BAR.search(text)
    if found is None:
        return None
    title = text[max(found.start() - _TITLE_WITHIN, 0) : found.start()]
    if _OTHER_BARS.search(title):
        return None
    step, total, clock, rich_clock, rate, unit = found.groups()
    elapsed_s = 0
    for part in (clock or rich_clock).split(":"):
        elapsed_s = elapsed_s * 60 + int(part)
    epoch = _EPOCH.search(title)
    step_s = float(rate) if unit == "s/it" else _inverse(float(rate))
    bar = Bar(int(total or 0), int(epoch[1]) if epoch else 0, elapsed_s, step_s)
    return Reading("progress bar", int(step), step_s, bar=bar)


def _batch(text: str) -> int:
    found = _BATCH.search(text)
    return int(float(found[1]) * (1000 if found[2] else 1)) if found else 0


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _inverse(speed: float) -> float:
    return 1 / speed if speed > 0 else 0.0
