"""What torch keeps of an incarnation's process groups and meshes, and how all of it is let go.

Two incarnations' DeviceMeshes compare and hash equal, so a cache that outlives one would hand its meshes to the next:
caches are emptied, groups get names that never come again, and whoever still holds a group or a mesh is found out.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import gc
import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_GLOO_THREADS = ("pt_gloo_runloop", "gloo_tcp_loop")
_QUIET_S = 0.003
_PATIENCE_S = 1.0
_CACHED = ("torch.distributed.tensor", "torch.distributed.device_mesh", "torch.distributed._functional")
_REFUSED = {  # by module: what a training that imported it may hold that a second one in this process would meet
    "deepspeed": "DeepSpeed",
    "megatron.core": "Megatron",
    "lightning.pytorch": "Lightning",
    "pytorch_lightning": "Lightning",
    "transformers.trainer": "the Trainer of transformers",
    "torch.distributed.pipelining.stage": "pipeline stages",
    "torch.distributed.rpc.api": "RPC",
}
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_COMPILED = "torch._dynamo.convert_frame"

_world: Any = distributed_c10d._world


def made() -> list[Any]:
    """The process groups that there are."""
    return list(_world.pg_map)


def refusal() -> str:
    """Why this process's training cannot be begun again in it, by what is alive and imported; "": it can."""
    for module, words in _REFUSED.items():
        if module in sys.modules and (module != "torch.distributed.rpc.api" or _rpc_runs()):
            return f"a training with {words} is begun again in a fresh process"
    backends = {
        str(group._get_backend(device).name()).lower() for group in made() for device in group._device_types
    }
    if backends - {"gloo"}:
        return f"groups of {', '.join(sorted(backends - {'gloo'}))} are made again in a fresh process"
    if getattr(sys.modules.get(_COMPILED), "FRAME_COUNTER", 0):
        return "compiled code is made again in a fresh process"
    sharded: Any = getattr(sys.modules.get(_FSDP1), "FullyShardedDataParallel", None)
    if sharded is not None and any(issubclass(type(one), sharded) for one in _objects()):
        return "a training with FSDP1 is begun again in a fresh process (FSDP2, fully_shard, is not)"
    return ""


def let_go() -> list[str]:
    """Destroy all groups, empty torch's caches of them, collect; what still holds something of them, in words."""
    kind: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    meshes = [weakref.ref(one) for one in _objects() if type(one) is kind]
    gc.collect()  # Works and models hold their groups
    _until_quiet()
    if made():
        dist.destroy_process_group()
    _empty_caches()
    if _gloo_threads() or any(one() is not None for one in meshes):
        gc.unfreeze()
        gc.collect()
    left = {
        "threads of process groups": len(_gloo_threads()),
        "device meshes": sum(one() is not None for one in meshes),
    }
    return [f"{count} {name}" for name, count in left.items() if count]


def _objects() -> Iterator[Any]:
    return iter(gc.get_objects())


def _rpc_runs() -> bool:
    return bool(cast("Any", torch.distributed).rpc._is_current_rpc_agent_set())


def _until_quiet() -> None:
    """Until Gloo's threads rest: a group's destructor waits for them while it holds the interpreter's lock.

    The connections are shut, so what they had to do has failed; what they still run are callbacks, and the ends of
    tensors, which need that lock. One that is ready to run and has no CPU does not rest.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    before, now = None, _gloo_threads()
    while time.monotonic() < deadline_s and (now != before or any(found[0] != "S" for found in now.values())):
        time.sleep(_QUIET_S)
        before, now = now, _gloo_threads()


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """State, and CPU time, waits and turns, of each."""
    found: dict[str, tuple[str, str]] = {}
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name.startswith(_GLOO_THREADS):
                with open(f"/proc/self/task/{thread}/schedstat") as turns:
                    found[thread] = rest.split(None, 1)[0], turns.read()
    return found


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
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", _nothing)()
        planning = sys.modules.get("torch.distributed.tensor._redistribute")
        getattr(planning, "clear_redistribute_planner_cache", _nothing)()


def _nothing() -> None:
    """In place of what this torch does not have."""
