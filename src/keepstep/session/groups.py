"""What torch keeps of an incarnation's process groups and meshes, and how all of it is dropped.

Two incarnations' DeviceMeshes compare and hash equal, so that a cache which outlives one incarnation would hand its
meshes to the next. Therefore caches are emptied, groups get names that are never used again, and groups and meshes that
something still holds are found.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from keepstep.session.default_group import DefaultGroup
from keepstep.session.holders import holder

_CALLERS = "pt_gloo_runloop"
_GLOO_THREADS = (_CALLERS, "gloo_tcp_loop")
_QUIET_S, _RESTED_S = 0.003, 0.025
_PATIENCE_S = 1.0
_CACHED = ("torch.distributed.tensor", "torch.distributed.device_mesh", "torch.distributed._functional")
_REFUSED = {  # by module: libraries that keep state of a training which the next one in this process would meet
    "deepspeed": "DeepSpeed",
    "megatron.core": "Megatron",
    "lightning.pytorch": "Lightning",
    "pytorch_lightning": "Lightning",
    "transformers.trainer": "the Trainer of transformers",
    "torch.distributed.rpc.api": "RPC",
}
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_COMPILED = "torch._dynamo.convert_frame"

_world: Any = distributed_c10d._world


def made() -> list[Any]:
    """All process groups of this process."""
    return list(_world.pg_map)


def calls() -> int | None:
    """Operations that were begun so far, in all groups; None where a backend does not count them."""
    try:
        return sum(group._get_sequence_number_for_group() for group in made())
    except RuntimeError:
        return None


def on_device() -> list[Any]:
    """The process groups whose operations run on GPUs by NCCL."""
    return [group for group in made() if "nccl" in _backends(group)]


def lost_on_device() -> str:
    """What torch's watchdog has found of other ranks: one is gone, or late; "": neither, or this torch does not tell.

    ``COMM_ERROR`` does not count: it may be an error of this rank's own GPU.
    """
    for group in on_device():
        for device in group._device_types:
            told: Any = getattr(group._get_backend(device), "get_error", None)
            if told is not None and (error := told().name) in ("REMOTE_ERROR", "TIMEOUT"):
                return f"torch's watchdog: {error}"
    return ""


def abort(groups: Sequence[Any]) -> None:
    """End the operations of groups on GPUs, so that whoever waits for one goes on. It may never return."""
    for group in groups:
        group.abort()


def _backends(group: Any) -> set[str]:
    return {str(group._get_backend(device).name()).lower() for device in group._device_types}


def refusal(*, gated: bool = False) -> str:
    """Why the training cannot begin again in this process, by what it has imported and made; "": it can.

    ``gated``: whether no optimizer step on a GPU can come from a collective that was aborted.
    """
    for module, words in _REFUSED.items():
        if module in sys.modules and (module != "torch.distributed.rpc.api" or _rpc_runs()):
            return f"a training with {words} is begun again in a fresh process"
    backends = {name for group in made() for name in _backends(group)}
    if others := backends - {"gloo", "nccl"}:
        return f"groups of {', '.join(sorted(others))} are made again in a fresh process"
    if "nccl" in backends and not gated:
        return (
            "its newest step on the GPU was behind no gate, as without an optimizer of torch.optim, with one in a "
            "CUDA graph, or before its first step"
        )
    if getattr(sys.modules.get(_COMPILED), "FRAME_COUNTER", 0):
        return "compiled code is made again in a fresh process"
    sharded: Any = getattr(sys.modules.get(_FSDP1), "FullyShardedDataParallel", None)
    if sharded is not None and any(issubclass(type(one), sharded) for one in _objects()):
        return "a training with FSDP1 is begun again in a fresh process (FSDP2, fully_shard, is not)"
    return ""


def let_go(default: DefaultGroup | None = None) -> list[str]:
    """Destroy all groups, empty torch's caches and collect garbage; returns what is still there, in words.

    ``default``: the default group, where it was made before the training. Objects that are left are frozen, so that the
    next collection looks only at those that the next training makes.
    """
    kind: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    meshes = [weakref.ref(one) for one in _objects() if type(one) is kind]
    _empty_caches()  # comes first, because the collector finds nothing that a cache still holds
    hooked = _hide_hooks()
    gc.collect()  # Works and models that are garbage hold groups
    _give_back_hooks(hooked)
    until_quiet()
    groups = [weakref.ref(one) for one in made()]
    are_named = bool(_gloo_threads())
    if default is not None:
        default.vacate()
    if groups:
        dist.destroy_process_group()
    if _left(groups, are_named, _RESTED_S) or any(one() is not None for one in meshes):
        gc.unfreeze()
        if default is not None:
            default.look_again()
        gc.collect()
    gc.freeze()
    left = {
        "threads of process groups": (_left(groups, are_named, _PATIENCE_S), groups),
        "device meshes": (sum(one() is not None for one in meshes), meshes),
    }
    return [f"{count} {name}{_by_whom(held)}" for name, (count, held) in left.items() if count]


def _by_whom(references: Sequence[weakref.ref[Any]]) -> str:
    """Who holds one of these, as far as that is found out: `` (a Trainer)``."""
    gc.unfreeze()  # frozen objects are searched, too: this process is about to be replaced
    alive = (one() for one in references)
    name = next((name for one in alive if one is not None and (name := holder(one))), "")
    return f" ({name})" if name else ""


def _objects() -> Iterator[Any]:
    return iter(gc.get_objects())


def _rpc_runs() -> bool:
    return bool(cast("Any", torch.distributed).rpc._is_current_rpc_agent_set())


def _left(groups: Sequence[weakref.ref[Any]], are_named: bool, patience_s: float) -> int:
    """Number of threads that are left, or of groups where this torch gives their threads no names (2.7)."""
    return _threads_left(patience_s) if are_named else sum(one() is not None for one in groups)


def _threads_left(patience_s: float) -> int:
    """Number of Gloo's threads after a wait, since a joined thread is listed until it has left the kernel, too."""
    deadline_s = time.monotonic() + patience_s
    while _gloo_threads() and time.monotonic() < deadline_s:
        time.sleep(_QUIET_S)
    return len(_gloo_threads())


def until_quiet() -> None:
    """Wait until Gloo's threads rest: a group's destructor waits for them while it holds the GIL.

    Their operations are done, or have failed with the connections. What they still run are callbacks and destructors of
    tensors, which need the GIL. A thread that is ready to run but has no CPU does not rest. The threads of connections
    wake up by themselves a hundred times a second and need no GIL: they only end the wait of the others.
    """
    began_s = rests_since_s = time.monotonic()
    before, now = None, _gloo_threads()
    while now:
        now_s, callers = time.monotonic(), _callers(now)
        if before is None or callers != _callers(before) or not _sleep(callers):
            rests_since_s = now_s
        elif (before == now and _sleep(now)) or now_s - rests_since_s >= _RESTED_S:
            return
        if now_s - began_s >= _PATIENCE_S:
            return
        time.sleep(_QUIET_S)
        before, now = now, _gloo_threads()


class _Thread(NamedTuple):
    name: str
    state: str
    turns: str  # text that changes whenever the thread has run


def _sleep(threads: dict[str, _Thread]) -> bool:
    return all(one.state == "S" for one in threads.values())


def _callers(threads: dict[str, _Thread]) -> dict[str, _Thread]:
    return {thread: one for thread, one in threads.items() if one.name.startswith(_CALLERS)}


def _gloo_threads() -> dict[str, _Thread]:
    found: dict[str, _Thread] = {}
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name.startswith(_GLOO_THREADS):
                with open(f"/proc/self/task/{thread}/schedstat") as turns:
                    found[thread] = _Thread(name, rest.split(None, 1)[0], turns.read())
    return found


_HOOKS = "_keepstep_hooks"


def _hide_hooks() -> list[weakref.ref[Any]]:
    """Keep hooks that step an optimizer inside backward where the garbage collector finds them; returns their tensors.

    Torch keeps what ``register_post_accumulate_grad_hook`` is given where it does not look: a parameter, its hook, and
    the optimizer that the hook steps would hold each other, and the GPU's memory, for ever.
    """
    hooked: list[weakref.ref[Any]] = []
    # Each type is looked at once: there may be a million objects, of few types.
    are_tensors: dict[type[Any], bool] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for one in _objects():
            kind = cast("type[Any]", type(one))
            if kind not in are_tensors:
                are_tensors[kind] = issubclass(kind, torch.Tensor)
            if are_tensors[kind] and (hooks := one._post_accumulate_grad_hooks):
                one.__dict__[_HOOKS] = dict(hooks)
                hooks.clear()
                hooked.append(weakref.ref(one))
    return hooked


def _give_back_hooks(hooked: Sequence[weakref.ref[Any]]) -> None:
    """Undo `_hide_hooks` for tensors that something outside the training holds."""
    with torch._C.DisableTorchFunctionSubclass():
        for reference in hooked:
            if (one := reference()) is not None:
                one._post_accumulate_grad_hooks.update(one.__dict__.pop(_HOOKS))


def _empty_caches() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(_CACHED):
            for value in list(vars(module).values()):
                inner = list(vars(value).values()) if isinstance(value, type) else []
                for one in (value, *inner):
                    function: Any = one.__func__ if type(one) is staticmethod else one
                    if type(function) is functools._lru_cache_wrapper:
                        function.cache_clear()
    tensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    dispatcher: Any = getattr(tensor, "_op_dispatcher", None)
    if dispatcher is not None:

        def empty(*_: Any) -> None:
            known = dispatcher.sharding_propagator.propagate_op_sharding
            cache = known if hasattr(known, "cache_clear") else known.cache  # torch < 2.9 has the latter
            cache.cache_clear()
            getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", _nothing)()

        empty()
        _in_backward_thread(empty)  # each thread has its own
        planning = sys.modules.get("torch.distributed.tensor._redistribute")
        getattr(planning, "clear_redistribute_planner_cache", _nothing)()


def _in_backward_thread(call: Callable[[Any], None]) -> None:
    """Call it in the thread in which torch runs the backward of this GPU; nothing is computed there."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError), torch.inference_mode(mode=False), torch.enable_grad():
            whole = torch.empty(1, device="cuda", requires_grad=True)
            part = whole.view(1)
            part.register_hook(call)
            torch.autograd.grad(part, whole, torch.empty_like(part))


def _nothing() -> None:
    """Stand in for a function that this torch does not have."""
