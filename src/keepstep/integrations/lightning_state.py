"""What a PyTorch Lightning trainer has beside model, optimizers and schedulers, told as plain values and tensors."""

from __future__ import annotations

import builtins
import random
from importlib import import_module
from typing import Any

import numpy as np
import torch

_USUAL = ("callbacks", "epoch", "global_step", "loops", "pytorch-lightning_version", "state_dict")
_TOLD = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
_LOGGED = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_NOTED = "keepstep_begun_with"


class Rest:
    """Of a trainer: loops, callbacks, datamodule, what users' hooks add to a checkpoint, and logged values.

    Attributes:
        data: what the iteration over the epoch's batches began with; see `note_random_states`. Of the loaded state.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] = {}
        self.data: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer, connector = self._trainer, self._trainer._logger_connector
        file = self._file(
            {one.state_key: state for one in trainer.callbacks if (state := one.state_dict())},
            trainer.fit_loop.state_dict(),
        )
        weights = dict(file["state_dict"])
        for one in trainer.callbacks:
            one.on_save_checkpoint(trainer, trainer.lightning_module, file)
        trainer.lightning_module.on_save_checkpoint(file)
        hooks = {key: value for key, value in file.items() if key not in _USUAL}
        if not _same(weights, file["state_dict"]):  # as averages of weights do
            hooks["state_dict"] = file["state_dict"]
        return {
            "loop": file["loops"]["fit_loop"],
            "callbacks": file["callbacks"],
            "hooks": hooks,
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule else {},
            "data": getattr(trainer.fit_loop._combined_loader, _NOTED, {}),
            "should_stop": trainer.should_stop,
            "told": [dict(getattr(connector, name)) for name in _TOLD],
            "metrics": {name: _sums(one) for name, one in _metrics(trainer).items()},
            "means": {
                key: _mean(one)
                for key, one in trainer.fit_loop.epoch_loop._results.items()
                if one.meta.sync.group is None  # a process group cannot be told
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, self._loaded, self.data = self._trainer, state, state["data"]
        file = self._file(state["callbacks"], state["loop"]) | state["hooks"]
        for one in trainer.callbacks:
            one.on_load_checkpoint(trainer, trainer.lightning_module, file)
            if one.state_key in state["callbacks"]:
                one.load_state_dict(state["callbacks"][one.state_key])
        trainer.lightning_module.on_load_checkpoint(file)
        if state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        trainer.fit_loop.load_state_dict(state["loop"])

    def finish(self) -> None:
        """Bring back what the beginning of `fit` sets back."""
        trainer, state = self._trainer, self._loaded
        trainer.should_stop = state["should_stop"]
        for name, told in zip(_TOLD, state["told"], strict=True):
            getattr(trainer._logger_connector, name).update(told)
        metrics, results = _metrics(trainer), trainer.fit_loop.epoch_loop._results
        for name, sums in state["metrics"].items():
            if name in metrics:
                _set_sums(metrics[name], sums)
                metrics[name].to(trainer.lightning_module.device)
        for key, mean in state["means"].items():
            results[key] = _made_mean(trainer, mean, metrics)
        trainer._logger_connector._first_loop_iter = True  # the next is not: no mean begins again

    def _file(self, callbacks: dict[str, Any], loop: dict[str, Any]) -> dict[str, Any]:
        """What users' hooks find in a checkpoint of Lightning's."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": import_module(package(trainer)).__version__,
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {"fit_loop": loop},
            "callbacks": callbacks,
        }


def _same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(right[name] is value for name, value in left.items())


def package(trainer: Any) -> str:
    """``lightning.pytorch`` or ``pytorch_lightning``, which stand side by side."""
    return type(trainer.fit_loop).__module__.partition(".loops")[0]


def random_states() -> dict[str, Any]:
    """Those that the order of data, and the workers' random states, are made of."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_random_states(state: dict[str, Any]) -> None:
    """Bring back what `random_states` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def note_random_states(trainer: Any) -> None:
    """Have every combined loader note the random states that its iteration begins with."""
    kind: Any = import_module(f"{package(trainer)}.utilities.combined_loader").CombinedLoader
    begin = kind.__iter__
    if hasattr(begin, _NOTED):
        return

    def noting(loader: Any) -> Any:
        setattr(loader, _NOTED, random_states())
        return begin(loader)

    setattr(noting, _NOTED, True)
    kind.__iter__ = noting


def _metrics(trainer: Any) -> dict[str, Any]:
    """torchmetrics in the model: most keep their sums out of its state_dict."""
    return {
        name: one for name, one in trainer.lightning_module.named_modules() if hasattr(one, "_update_count")
    }


def _sums(metric: Any) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in (*metric._defaults, "_update_count")}


def _set_sums(metric: Any, sums: dict[str, Any]) -> None:
    for name, value in sums.items():
        setattr(metric, name, value)


def _mean(one: Any) -> dict[str, Any]:
    """A value of ``self.log`` over the epoch so far, and all that Lightning compares with the next call's."""
    reduce = one.meta.reduce_fx
    return {
        "meta": {name: getattr(one.meta, name) for name in _LOGGED},
        "reduce": [reduce.__name__, reduce.__module__ == "builtins"],
        "sync": [bool(one.meta.sync.should), one.meta.sync.rank_zero_only],
        "tensor": one.is_tensor,
        "reset": one.has_reset,
        "sums": _sums(one),
    }


def _made_mean(trainer: Any, mean: dict[str, Any], metrics: dict[str, Any]) -> Any:
    kinds: Any = import_module(f"{package(trainer)}.trainer.connectors.logger_connector.result")
    name, plain = mean["reduce"]
    meta = kinds._Metadata(**mean["meta"], reduce_fx=getattr(builtins if plain else torch, name))
    should, rank_zero_only = mean["sync"]
    meta.sync = kinds._Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
    made = kinds._ResultMetric(meta, mean["tensor"])
    _set_sums(made, mean["sums"])
    made.has_reset = mean["reset"]
    if not mean["tensor"]:
        made.value = metrics[meta.metric_attribute]
    return made.to(trainer.lightning_module.device)
