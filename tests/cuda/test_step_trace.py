"""A trace of a process that uses a GPU: CUPTI is the stand-in's, which records nothing, and that breaks nothing."""

from __future__ import annotations

from pathlib import Path

from tests.cuda.test_runtime import in_a_process

CODE = """
import gzip, json, os
from types import SimpleNamespace
from keepstep.capture import step_trace
from keepstep.capture.hold import COUNT, ORDER, Hold
from keepstep.ring import orders

step_trace._LEAST_FREE_BYTES = 0
descriptor = orders.create()
os.environ["KEEPSTEP_ORDERS"] = f"/proc/{os.getpid()}/fd/{descriptor}"
page = orders.OrdersPage(descriptor)
hold = Hold(SimpleNamespace(phase=lambda phase: None, stumbled=print))
hold.open()
until_ns = time.monotonic_ns() + int(60e9)
order = {"steps": 2, "per_step": 1, "base_step": 4, "base_count": 0, "until_ns": until_ns, "folder": "traces"}
page.trace.put(1, order)
page.knock(True)
for step in range(1, 5):
    x.add_(1)
    hold.words[COUNT] = step
    if hold.words[ORDER]:
        hold.look(step)
torch.cuda.synchronize()
assert until(lambda: page.traced.newest()[1]["state"] in ("written", "failed"))
told = page.traced.newest()[1]
assert told["state"] == "written", told
text = gzip.open(os.path.join("traces", "rank-00000-step-6.json.gz")).read()
names = [one.get("name") for one in json.loads(text)["traceEvents"]]
print(names.count("aten::add_"), told["step"])
"""


def test_the_steps_of_the_host_are_in_the_file(tmp_path: Path) -> None:
    code = f"import os\nos.chdir({str(tmp_path)!r})\n{CODE}"
    assert in_a_process(tmp_path, code) == "2 6"
