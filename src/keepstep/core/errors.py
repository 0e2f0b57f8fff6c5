"""The one exception tree. A message says what is wrong, where, and what to do next."""


class KeepstepError(Exception):
    """Root of every error that keepstep raises on purpose."""


class UsageError(KeepstepError):
    """A flag, argument or configuration value cannot be used (exit code 2)."""


class LayoutError(KeepstepError):
    """Parallel sizes, orders or group memberships contradict each other."""


class RingError(KeepstepError):
    """A file or descriptor is no ring, link table or orders page of ours, is cut short, or has another version."""


class WireError(KeepstepError):
    """A peer sent what the protocol does not allow; the connection is closed, nothing else is harmed."""


class AuthenticationError(WireError):
    """A peer did not prove that it holds the run's secret."""


class FaultError(KeepstepError):
    """A fault sentence cannot be parsed or carried out."""


class TraceError(KeepstepError):
    """A trace cannot be read or used: names the file or rank, and what is wrong with it."""


class RunError(KeepstepError):
    """A run cannot be started, found or read."""


class LostJobError(RunError):
    """The job goes on without this node, or is gone: the node may begin again, or another one (exit code 75)."""


class UnsafePathError(KeepstepError, OSError):
    """A file or folder that another user could have put there or could replace; nothing is written to it."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class CheckpointError(KeepstepError):
    """A state cannot be saved as asked, or a snapshot is damaged, foreign or not the one wanted."""


class MisfitError(CheckpointError):
    """What was saved does not fit the script or the job, and would not after any restart."""


OTHER_RANKS = "ranks, this job has"
"""In the line that refuses a saved step because it is of another number of ranks. Others may be read later on."""
