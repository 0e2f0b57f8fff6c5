import pytest

from keepstep.checkpoint.storage.cost import (
    Costs,
    Limits,
    ShardedModel,
    best_interval,
    optimal_steps,
    save_gain,
)
from keepstep.core.errors import CheckpointError

DAY = Costs(period_s=86_400, failures=2, recovery_s=150, checkpoint_s=1.0, step_s=5.0)


def test_the_interval_by_hand() -> None:
    # sqrt(2 · 86400 · 1 / 2) = 293.9 s = 58.8 steps of 5 s
    assert optimal_steps(DAY) == pytest.approx(58.788, abs=1e-3)
    found = best_interval(DAY)
    assert (found.steps, found.decided_by) == (59, "optimum")
    assert found.lost_s == pytest.approx(2 * 59 * 5 / 2)
    assert found.recovery_s == 300


def test_a_free_checkpoint_is_taken_every_step_unless_copy_or_backup_last_longer() -> None:
    free = Costs(86_400, 2, 150, 0.0, 5.0)
    assert (best_interval(free).steps, best_interval(free).decided_by) == (1, "step")
    copied = best_interval(free, Limits(copy_s=5.1))
    assert (copied.steps, copied.decided_by) == (2, "copy")
    sent = best_interval(free, Limits(copy_s=5.1, backup_s=61))
    assert (sent.steps, sent.decided_by) == (13, "backup")


def test_the_slowdown_is_bounded() -> None:
    often = Costs(86_400, 5_000, 1, 1.0, 5.0)
    found = best_interval(often, Limits(slowdown=0.01))
    assert (found.steps, found.decided_by) == (20, "slowdown")
    assert found.saving_s == pytest.approx(864)


def test_transoms_own_example() -> None:
    # 175e9 parameters on 16 nodes of 8, DP 8: 38 GB by the most loaded rank; its 4.5 minutes give 142 MB/s, and its
    # 71.1 MB/s belong to the mean rank's 19 GB (14 bytes a parameter over 128 ranks).
    model = ShardedModel(175e9, nodes=16, data_parallel=8)
    assert model.most_saved_bytes == pytest.approx(38.28e9, rel=1e-3)
    assert pytest.approx(71.1e6, rel=5e-3) == 14 * 175e9 / 128 / 270
    assert save_gain(10e9, 71.1e6) == pytest.approx(140.6, rel=1e-3)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ((86_400, 0, 0, 1, 5), "failures is 0"),
        ((86_400, 2, 0, 1, float("nan")), "step s is nan"),
        ((86_400, 2, -1, 1, 5), "recovery s is -1"),
    ],
)
def test_terms_that_cannot_be_are_named(terms: tuple[float, ...], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Costs(*terms)


def test_wrong_units_and_sizes_are_said() -> None:
    with pytest.raises(CheckpointError, match="check the units"):
        best_interval(Costs(1e30, 1e-3, 0, 1e9, 1e-9))
    with pytest.raises(CheckpointError, match="does not divide the 16 ranks"):
        ShardedModel(1e9, nodes=2, data_parallel=3)
    with pytest.raises(CheckpointError, match="must be a multiple"):
        ShardedModel(1e9, nodes=3, data_parallel=12)
