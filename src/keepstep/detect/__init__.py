"""Is something wrong with the job, and since when? Pure: no torch, no input or output, no clock."""

from keepstep.detect.changepoint import ChangeKind, ChangePoint, ChangePointDetector, change_points

__all__ = ["ChangeKind", "ChangePoint", "ChangePointDetector", "change_points"]
