"""A bounded store of own times by rank and step, which serves live and ended runs alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class SampleStore:
    """Own times of all ranks over all steps so far, in at most ``most_columns`` columns.

    A column stands for ``stride`` steps from `first_step_of` on, and holds the longest own time that was
    sampled of each rank in them, on a logarithmic scale. When the columns are full each two of them become one
    and the stride doubles, so that the whole run is kept however long it is.
    """

    def __init__(self, most_columns: int = 384) -> None: ...

    def take(
        self,
        ranks: npt.NDArray[np.int32],
        steps: npt.NDArray[np.int64],
        self_s: npt.NDArray[np.float32],
        iteration_s: npt.NDArray[np.float32],
    ) -> None:
        """Add one sample a rank: arrays of one length. A rank beyond 2**20 or a negative step is left out."""
        raise NotImplementedError
