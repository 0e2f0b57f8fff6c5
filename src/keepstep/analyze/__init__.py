"""What went wrong, from traces that were left behind: keepstep's own runs and other tools' dumps and logs."""

from keepstep.analyze.analysis import Analysis, analyze, analyze_running

__all__ = ["Analysis", "analyze", "analyze_running"]
