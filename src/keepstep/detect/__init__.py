"""Is something wrong with the job, and since when? Pure: no torch, no input or output, no clock."""

# ruff: noqa: F401
# pyright: reportUnusedImport=false
from keepstep.detect.changepoint import ChangeKind, ChangePoint, ChangePointDetector, change_points
from keepstep.detect.host_causes import host_cause
from keepstep.detect.no_progress import HangDetector, NoProgress
from keepstep.detect.stillness import Activity, StillnessJudge, is_served
