"""Knows which tensors only an optimizer's step changes, and calls back before such a step.

A snapshot may copy these tensors in the background until then. And of these it is known which belong together: a
parameter and what the optimizer keeps for it are a *family*.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from keepstep.checkpoint.state import identity, local_of


class Family(NamedTuple):
    """A parameter and what an optimizer keeps for it.

    Attributes:
        storages: by `state.identity`; that of the parameter is the first.
        is_whole: whether the parameter is there.
        decays: whether weight decay may change all of it, without a gradient.
    """

    storages: tuple[int, ...]
    is_whole: bool
    decays: bool


class OptimizerWatch:
    """Notices the steps of every `torch.optim.Optimizer` of this process.

    ``before_step`` gets the storages of the optimizer's tensors, lazily and parameters first, before each step. When
    an optimizer of PyTorch's own is given a closure (forward and backward), as Lightning does, it is called after the
    closure's first call. An optimizer is known once it has stepped, because its state exists only then. Once an
    optimizer has stepped inside a backward pass, no tensors are copied in the background any more: the time between
    two such steps is too short.
    """

    def __init__(self, before_step: Callable[[Iterator[int]], None]) -> None:
        self._before_step = before_step
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.in_backward = False
        unseen = cast("Any", torch.compiler).disable  # torch.compile must not trace the hooks
        self._hooks = (
            register_optimizer_step_pre_hook(unseen(self._before)),
            register_optimizer_step_post_hook(unseen(self._after)),
        )

    def families(self) -> list[Family]:
        """The families of all known optimizers: what only their steps are expected to change."""
        return [family for optimizer in self._known for family in _families(optimizer)]

    def owned(self, families: Iterable[Family]) -> set[int]:
        """The storages of families that may be copied in the background."""
        return set() if self.in_backward else {one for family in families for one in family.storages}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if cast("Any", torch)._C._current_graph_task_id() != -1:
            self.in_backward = True
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure) and type(optimizer).__module__.startswith("torch.optim."):
            return args[:1], {**kwargs, "closure": lambda: self._after_first(closure(), optimizer)}
        self._before_step(_storages(optimizer))
        return None

    def _after_first(self, loss: Any, optimizer: torch.optim.Optimizer) -> Any:
        """Call ``before_step`` once the closure has returned ``loss``: no tensor has been changed until then."""
        self._before_step(_storages(optimizer))
        return loss

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._known.add(optimizer)


def _storages(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    parameters = (group["params"] for group in optimizer.param_groups)
    states = cast("dict[Any, Any]", optimizer.state).values()
    of_states = (cast("dict[str, Any]", state).values() for state in states if isinstance(state, dict))
    yield from _identities(chain.from_iterable(chain(parameters, of_states)))


def _families(optimizer: torch.optim.Optimizer) -> Iterator[Family]:
    states = dict(cast("dict[Any, Any]", optimizer.state))
    for group in optimizer.param_groups:
        decays = _decays(group, optimizer)
        for parameter in group["params"]:
            own, of_state = tuple(_identities((parameter,))), _of_state(states.pop(parameter, None))
            # Decoupled weight decay changes a parameter, and nothing that is kept for it.
            yield Family(own + of_state, bool(own), decays == "coupled" or (bool(decays) and not of_state))
    for kept in states.values():
        yield Family(_of_state(kept), False, False)


def _of_state(kept: Any) -> tuple[int, ...]:
    return tuple(_identities(cast("dict[str, Any]", kept).values())) if isinstance(kept, dict) else ()


def _decays(
    group: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> Literal["", "coupled", "decoupled"]:
    if not group.get("weight_decay"):
        return ""
    decoupled = group.get("decoupled_weight_decay") or isinstance(optimizer, torch.optim.AdamW)
    return "decoupled" if decoupled else "coupled"


def _identities(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, torch.Tensor):
            local = local_of(value)
            if type(local) in (torch.Tensor, torch.nn.Parameter):
                yield identity(local.untyped_storage())
