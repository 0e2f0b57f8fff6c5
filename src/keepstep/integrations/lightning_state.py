"""The state of a PyTorch Lightning trainer beside model, optimizers and schedulers, as plain values and tensors."""

from __future__ import annotations

import builtins
from importlib import import_module
from typing import Any

import torch

from keepstep import checkpoint

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
    """State of a trainer: loops, callbacks, datamodule, what users' hooks add to a checkpoint, and logged values.

    Attributes:
        data: the random states with which the iteration over the epoch's batches began, from the loaded state.
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
        if not _same(weights, file["state_dict"]):  # a hook replaced weights, as those that average them do
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
                if one.meta.sync.group is None  # a process group cannot be saved
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
        """Restore the values that the beginning of `fit` resets."""
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
        trainer._logger_connector._first_loop_iter = True  # so that the next batch resets no mean

    def _file(self, callbacks: dict[str, Any], loop: dict[str, Any]) -> dict[str, Any]:
        """The dict that users' hooks get as Lightning's checkpoint."""
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
    """Name of the trainer's package, ``lightning.pytorch`` or ``pytorch_lightning``; both may be installed."""
    return type(trainer.fit_loop).__module__.partition(".loops")[0]


def note_random_states(trainer: Any) -> None:
    """Have every combined loader store the random states with which its iteration begins."""
    kind: Any = import_module(f"{package(trainer)}.utilities.combined_loader").CombinedLoader
    begin = kind.__iter__
    if hasattr(begin, _NOTED):
        return

    def noting(loader: Any) -> Any:
        setattr(loader, _NOTED, checkpoint.RandomState().state_dict())
        return begin(loader)

    setattr(noting, _NOTED, True)
    kind.__iter__ = noting


def _metrics(trainer: Any) -> dict[str, Any]:
    """The model's torchmetrics by name; most of them keep their sums out of its state_dict."""
    return {
        name: one for name, one in trainer.lightning_module.named_modules() if hasattr(one, "_update_count")
    }


def _sums(metric: Any) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in (*metric._defaults, "_update_count")}


def _set_sums(metric: Any, sums: dict[str, Any]) -> None:
    for name, value in sums.items():
        setattr(metric, name, value)


def _mean(one: Any) -> dict[str, Any]:
    """The mean of a value logged with ``self.log`` in this epoch, with the settings that later calls must repeat."""
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
