"""Readers of what jobs leave behind, runs of keepstep and traces of other tools, and a writer of Chrome traces."""

from keepstep.traces.chrome import write_chrome_trace
from keepstep.traces.runs import Run, name_run, notices_of, open_run

__all__ = ["Run", "name_run", "notices_of", "open_run", "write_chrome_trace"]
