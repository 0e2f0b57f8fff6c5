"""Keeps every optimizer step of PyTorch Lightning's ``fit`` in memory, by one callback.

    trainer = Trainer(callbacks=[keepstep.integrations.lightning.Recovery()], ...)
    trainer.fit(model, data)

Lightning calls hooks in the middle of a batch, but a step is complete only when the epoch loop has advanced: after
hooks, validation and schedulers. So a save follows `on_advance_end` of the trainer's epoch loop. Counters, data
position and random states are restored after `on_run_start` of that loop, the last call before the first batch, because
the beginning of `fit` changes them.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from typing import Any

from keepstep import checkpoint
from keepstep.checkpoint.memory.cache_server import ADDRESS, NO_CACHE
from keepstep.core.errors import CheckpointError
from keepstep.integrations.lightning_state import Rest, note_random_states

try:
    _pl: Any = import_module("lightning.pytorch")
except ImportError:
    _pl = import_module("pytorch_lightning")

_REFUSED = {
    "DeepSpeedStrategy": "its shards are saved by DeepSpeed: use keepstep.integrations.deepspeed without Lightning",
    "FSDPStrategy": "FSDP1 keeps flat parameters, which only a collective takes apart: use ModelParallelStrategy "
    "(fully_shard)",
}
_KEPT = ("DDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy")
_kept: list[object] = []  # the callback whose fit is kept; a process has only one


class Recovery(_pl.Callback):
    """Saves each optimizer step of the first `fit` of a process, and restores the newest step when that `fit` begins.

    Outside ``keepstep run`` it does nothing. `fit` raises `CheckpointError` when the state cannot be taken from this
    strategy or these data loaders (the message says why), or cannot be saved or restored.
    """

    _fit: _Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lightning's hook before the model is on its device: refuses a trainer whose steps cannot be kept."""
        if stage != "fit" or not (os.environ.get(ADDRESS) or os.environ.get(NO_CACHE)):
            return
        if _kept:
            print("keepstep: only the first fit of a process is kept in memory", file=sys.stderr, flush=True)
            return
        reason = _why_not(trainer.strategy)
        if reason:
            raise CheckpointError(f"steps of this Lightning trainer cannot be kept in memory: {reason}")
        _kept.append(self)
        self._fit = _Fit(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook after model and optimizers were made: restores the newest step."""
        if self._fit:
            self._fit.restore()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook at the end of `fit`: waits for the last snapshot."""
        if self._fit:
            checkpoint.wait()
        self.on_exception(trainer, pl_module, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: object) -> None:
        """Lightning's hook when `fit` fails: takes keepstep's functions out of the loops."""
        if self._fit:
            self._fit.leave()
        self._fit = None


class _Fit:
    """Saves and restores the state of one trainer during its `fit`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer: Any = trainer
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._begin, self._advanced = self._loop.on_run_start, self._loop.on_advance_end
        self._loop.on_run_start, self._loop.on_advance_end = self._on_run_start, self._on_advance_end
        self._random, self._rest = _Later(checkpoint.RandomState()), Rest(trainer)
        self._state: dict[str, Any] = {}
        self._step = 0  # the last step that was saved
        self._max_steps: int = self._loop.max_steps
        self._resumes = False
        note_random_states(trainer)

    def restore(self) -> None:
        """Restore everything but what the beginning of `fit` changes."""
        trainer, loop = self._trainer, self._loop
        self._state = {
            "random": self._random,
            "module": trainer.lightning_module,
            "optimizers": {str(index): one for index, one in enumerate(trainer.optimizers)},
            "schedulers": {str(i): one.scheduler for i, one in enumerate(trainer.lr_scheduler_configs)},
            "precision": trainer.precision_plugin,
            "trainer": self._rest,
        }
        self._step = checkpoint.load(self._state) or 0
        self._resumes = self._step > 0
        if not self._resumes:
            return
        # A file named by fit(ckpt_path=...) must not overwrite the restored state.
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint, connector.resume_start = {}, _do_nothing
        if 0 <= self._max_steps <= loop.global_step:
            loop.max_steps = -1  # otherwise Lightning ends at once and skips the end of the epoch
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")

    def leave(self) -> None:
        """Restore Lightning's own functions."""
        self._loop.__dict__.pop("on_run_start", None)
        self._loop.__dict__.pop("on_advance_end", None)
        self._trainer._checkpoint_connector.__dict__.pop("resume_start", None)

    def _on_run_start(self, data_fetcher: Any) -> None:
        """Runs before an epoch's first batch, or its next one after a restore."""
        stateful = _are_stateful(data_fetcher)
        if not self._resumes:
            self._begin(data_fetcher)
            return
        done = self._loop.batch_progress
        if not stateful and not done.is_last_batch:
            _skip(data_fetcher, done.current.ready, self._rest.data)
        self._begin(data_fetcher)
        # The rest of the epoch must not count as a restart, because Lightning would repeat a part of the last batch.
        self._loop.restarting = self._trainer.fit_loop._restarting = self._resumes = False
        self._loop.max_steps = self._max_steps
        self._rest.finish()
        self._random.load()

    def _on_advance_end(self, data_fetcher: Any) -> None:
        """Runs after each batch; saves if an optimizer stepped in it."""
        self._advanced(data_fetcher)
        if self._loop.global_step > self._step:
            self._step = self._loop.global_step
            # After an epoch's last batch callbacks may change weights (averages), so the copy must not overlap.
            checkpoint.save(self._state, self._step, overlap=not self._loop.batch_progress.is_last_batch)


def _are_stateful(fetcher: Any) -> bool:
    """Whether the data loaders of a `fit` keep their position. Raises CheckpointError where it would be lost."""
    loaders = fetcher.combined_loader.flattened
    kept = [hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loaders]
    reason = ""
    if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
        reason = "training_step(dataloader_iter) takes batches that nobody counts: take a batch"
    elif any(kept) and not all(kept):
        reason = "some train dataloaders have state_dict and others not: all or none"
    elif any(kept) and fetcher.length is None:
        reason = "a train dataloader with state_dict and no length is read one batch ahead: give it __len__"
    if reason:
        raise CheckpointError(f"the data position of this Lightning trainer cannot be kept: {reason}")
    return all(kept)


def _skip(fetcher: Any, batches: int, begun_with: dict[str, Any]) -> None:
    """Start the epoch's order again with its original random states, and skip the first batches."""
    fetcher.combined_loader.reset()  # ends its workers, which were started with other random states
    checkpoint.RandomState().load_state_dict(begun_with)
    iter(fetcher)
    for _ in range(batches):
        next(fetcher)
    fetcher.fetched -= batches  # Lightning adds the skipped batches itself


class _Later:
    """Wraps an object so that ``load_state_dict`` only stores the state, and `load` really loads it later."""

    def __init__(self, of: Any) -> None:
        self._of, self._loaded = of, None

    def state_dict(self) -> Any:
        return self._of.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loaded = state

    def load(self) -> None:
        self._of.load_state_dict(self._loaded)


def _do_nothing(*_: object, **__: object) -> None:
    pass


def _why_not(strategy: Any) -> str:
    """The reason why this strategy's states cannot be kept in memory; "" when they can."""
    names = [kind.__name__ for kind in type(strategy).__mro__]
    for name in names:
        if name in _REFUSED:
            return f"{name}: {_REFUSED[name]}"
    if not any(name in _KEPT for name in names):
        return f"{names[0]} has had no test; {', '.join(_KEPT)} have"
    return ""
