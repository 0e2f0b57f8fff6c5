"""Perfetto wants the bars of a track strictly nested; any set of operations must come out so, with none lost."""

import gzip
import json
import shutil
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from keepstep.traces.chrome import Span, write_chrome_trace

SPANS = st.lists(
    st.builds(
        lambda track, start, length: Span(track, "op", float(start), float(start + length), {}),
        st.sampled_from(["phases", "group 0", "point-to-point"]),
        st.integers(0, 50),
        st.integers(0, 20),
    ),
    max_size=40,
)


@given(SPANS)
def test_bars_of_a_lane_nest_and_none_is_lost(spans: list[Span]) -> None:
    out = Path(tempfile.mkdtemp()) / "trace.json.gz"
    try:
        assert write_chrome_trace(out, {3: spans}) == len(spans)
        events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    finally:
        shutil.rmtree(out.parent)
    bars = [event for event in events if event["ph"] == "X"]
    assert sorted((b["ts"], b["dur"]) for b in bars) == sorted(
        (s.start_us, s.end_us - s.start_us) for s in spans
    )
    assert {bar["pid"] for bar in bars} <= {3}
    for one in bars:
        for other in bars:
            if one is not other and one["tid"] == other["tid"]:
                assert disjoint(one, other) or inside(one, other) or inside(other, one)


def disjoint(a: dict, b: dict) -> bool:
    return a["ts"] + a["dur"] <= b["ts"] or b["ts"] + b["dur"] <= a["ts"]


def inside(a: dict, b: dict) -> bool:
    return b["ts"] <= a["ts"] and a["ts"] + a["dur"] <= b["ts"] + b["dur"]
