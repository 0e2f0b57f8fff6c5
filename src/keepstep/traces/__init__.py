"""What a run left behind (rings, iterations, incidents), read back and written out for other people's viewers."""

from keepstep.traces.chrome import write_chrome_trace
from keepstep.traces.runs import Iteration, Run, open_run

__all__ = ["Iteration", "Run", "open_run", "write_chrome_trace"]
