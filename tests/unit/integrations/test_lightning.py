"""`keepstep.integrations.lightning`: it refuses with the reason in one line; without `keepstep run` it does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'keepstep[lightning]'")

from lightning.pytorch import LightningModule, Trainer  # pyright: ignore[reportMissingImports]
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher  # pyright: ignore[reportMissingImports]
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy  # pyright: ignore[reportMissingImports]
from lightning.pytorch.utilities.combined_loader import CombinedLoader  # pyright: ignore[reportMissingImports]

from keepstep.checkpoint import RandomState
from keepstep.checkpoint.memory.cache_server import NO_CACHE
from keepstep.core.errors import CheckpointError
from keepstep.integrations import lightning
from keepstep.integrations.lightning import Recovery

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


class Stream:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(3, 2))


class Sized(Stream):
    def __len__(self) -> int:
        return 3


class StatefulStream(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StatefulSized(Sized, StatefulStream): ...


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fetched(fetcher: Any, *loaders: Any) -> Any:
    fetcher.setup(CombinedLoader(list(loaders)))
    return iter(fetcher)


def trainer(**settings: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(
        accelerator="cpu", devices=1, max_epochs=1, enable_model_summary=False, **quiet, **settings
    )


def test_strategies_whose_states_lie_elsewhere_are_refused() -> None:
    assert "FSDP1" in lightning._why_not(FSDPStrategy())
    assert "keepstep.integrations.deepspeed" in lightning._why_not(object.__new__(DeepSpeedStrategy))
    assert "has had no test" in lightning._why_not(object())
    assert not lightning._why_not(DDPStrategy())
    assert not lightning._why_not(SingleDeviceStrategy("cpu"))


@pytest.mark.parametrize(
    ("fetcher", "loaders", "reason"),
    [
        (_PrefetchDataFetcher, (Sized(), StatefulSized()), "all or none"),
        (_PrefetchDataFetcher, (StatefulStream(),), "__len__"),
        (_DataLoaderIterDataFetcher, (Sized(),), "nobody counts"),
    ],
)
def test_loaders_whose_position_cannot_be_told_are_refused(
    fetcher: Any, loaders: tuple[Any, ...], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        lightning._are_stateful(fetched(fetcher(), *loaders))


def test_other_loaders_are_taken() -> None:
    assert not lightning._are_stateful(fetched(_PrefetchDataFetcher(), Sized(), Stream()))
    assert lightning._are_stateful(fetched(_PrefetchDataFetcher(), StatefulSized()))


@pytest.mark.parametrize("prefetched", [True, False])
def test_what_is_passed_over_is_not_seen_again(prefetched: bool) -> None:
    class Numbers:
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    class SizedNumbers(Numbers):
        def __len__(self) -> int:
            return 5

    fetcher = fetched(_PrefetchDataFetcher(), Numbers() if prefetched else SizedNumbers())
    lightning._skip(fetcher, 3, RandomState().state_dict())
    fetcher.fetched += 3  # as Lightning's loop does
    assert [next(fetcher)[0] for _ in range(2)] == [[3], [4]]
    assert fetcher.done
    with pytest.raises(StopIteration):
        next(fetcher)


def test_without_keepstep_run_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (lightning.ADDRESS, NO_CACHE):
        monkeypatch.delenv(name, raising=False)
    one = trainer(callbacks=[Recovery()])
    one.fit(Model(), Sized())
    assert one.global_step == 3
    assert not {"on_run_start", "on_advance_end"} & vars(one.fit_loop.epoch_loop).keys()
    assert not lightning._kept
