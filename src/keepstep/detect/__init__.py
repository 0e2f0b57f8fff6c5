"""Is something wrong with the job, and since when? Pure: no torch, no input or output, no clock."""

from keepstep.detect.changepoint import ChangeKind, ChangePoint, ChangePointDetector, change_points
from keepstep.detect.hang import HangDetector, NoProgress
from keepstep.detect.host import HostCause, HostCauseKind, HostSample, host_cause
from keepstep.detect.period import Period, find_period

__all__ = [
    "ChangeKind",
    "ChangePoint",
    "ChangePointDetector",
    "HangDetector",
    "HostCause",
    "HostCauseKind",
    "HostSample",
    "NoProgress",
    "Period",
    "change_points",
    "find_period",
    "host_cause",
]
