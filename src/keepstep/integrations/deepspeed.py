"""Keeps DeepSpeed's checkpoints in memory: one call puts in a `CheckpointEngine`, and no file of DeepSpeed is changed.

    model_engine, optimizer, _, _ = deepspeed.initialize(...)
    keepstep.integrations.deepspeed.install(model_engine, files_every=100)
    model_engine.load_checkpoint(folder)  # from memory when all ranks have it there, else from DeepSpeed's files
    ...
    model_engine.save_checkpoint(folder)  # into memory; each 100th into DeepSpeed's files, too

A save has two passes. In the first, DeepSpeed gives its states to `MemoryEngine`, on each rank all that this rank needs
to resume, and they become a snapshot in the node's cache before the second pass begins. The second pass, when it is
due, is DeepSpeed's own save with the engine that its configuration chose. A save into memory never touches that engine,
so what it has pending stays pending. Everything is copied when ``save_checkpoint`` returns, because DeepSpeed moves
parameters in and out of its optimizers (ZeRO-3) and writes 16-bit weights itself, without a hook that says when.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Generator, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import msgspec
import torch
import torch.distributed as dist

from keepstep import checkpoint
from keepstep.checkpoint.memory.cache_server import ADDRESS, Open, ask
from keepstep.core.errors import CheckpointError
from keepstep.integrations.deepspeed_values import from_plain, pack, to_plain, unpack

STATES = "keepstep_states"
"""Key in the client state of DeepSpeed's files, for the packed states given to `install`, by rank."""

_MOST_TAGS = 16


class Stateful(Protocol):
    """An object whose state can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def install(model_engine: Any, *, files_every: int = 1, state: Mapping[str, Stateful] | None = None) -> None:
    """Have ``model_engine.save_checkpoint`` keep each checkpoint in memory, and ``load_checkpoint`` look there first.

    Called by all ranks after ``deepspeed.initialize``. Without ``keepstep run`` there is no memory to keep checkpoints
    in, and all go to the files.

    Args:
        model_engine: the engine that ``deepspeed.initialize`` returned.
        files_every: each such save goes to DeepSpeed's files, too; 0: only saves called with ``files=True``, an
            argument that ``save_checkpoint`` takes besides its own (``files=False`` keeps a save out of the files).
        state: objects with states that each rank has of its own (random states, data position), by name. They are saved
            and loaded with each checkpoint, in memory or in files.

    Raises:
        CheckpointError: this engine keeps something that a rank needs to resume where `MemoryEngine` cannot get it; the
            message says what.
    """
    if files_every < 0:
        raise CheckpointError(f"files_every={files_every}: 0 (never by itself), 1 (each save), 2, …")
    if isinstance(getattr(model_engine, "checkpoint_engine", None), MemoryEngine):
        raise CheckpointError(
            "this DeepSpeed engine keeps its checkpoints in memory already: call install() once"
        )
    reason = _why_not(model_engine)
    if reason:
        raise CheckpointError(f"checkpoints of this DeepSpeed engine cannot be kept in memory: {reason}")
    import_module("deepspeed.runtime.checkpoint_engine.checkpoint_engine").CheckpointEngine.register(
        MemoryEngine
    )
    memory = MemoryEngine(model_engine.checkpoint_engine)
    checkpoints = _Checkpoints(model_engine, memory, files_every, dict(state or {}))
    model_engine.checkpoint_engine = memory
    model_engine.save_checkpoint = checkpoints.save
    model_engine.load_checkpoint = checkpoints.load


class MemoryEngine:
    """A ``CheckpointEngine`` of DeepSpeed that holds states in memory while told to, and else forwards to ``inner``."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._taken: dict[str, Any] | None = None
        self._given: dict[str, Any] | None = None
        self._folder = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextlib.contextmanager
    def taking(self, folder: str) -> Generator[dict[str, Any]]:
        """While the context is open, states saved below ``folder`` go into the dict, by path, and nowhere else."""
        self._taken, self._folder = {}, folder
        try:
            yield self._taken
        finally:
            self._taken = None

    @contextlib.contextmanager
    def giving(self, folder: str, states: dict[str, Any]) -> Generator[None]:
        """While the context is open, states loaded from below ``folder`` come from ``states``, by path."""
        self._given, self._folder = states, folder
        try:
            yield
        finally:
            self._given = None

    def create(self, info: Any) -> Any:
        return self._inner.create(info) if self._taken is None else None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        (self._inner if self._taken is None else os).makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> Any:
        if self._taken is None:
            return self._inner.save(state_dict, path)
        self._taken[os.path.relpath(path, self._folder)] = state_dict
        return None

    def load(self, path: str, map_location: Any = None) -> Any:
        if self._given is None:
            return self._inner.load(path, map_location=map_location)
        name = os.path.relpath(path, self._folder)
        if name not in self._given:
            raise CheckpointError(f"the checkpoint in memory has no {name}, which DeepSpeed asks for")
        return from_plain(self._given[name], name)

    def commit(self, info: Any) -> Any:
        return self._inner.commit(info) if self._taken is None else True

    def is_decoupled(self) -> bool:
        return self._taken is None and self._inner.is_decoupled()


class _About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a checkpoint that is stored with its snapshot.

    Attributes:
        folder: absolute path of the folder that it was saved for.
        tag: DeepSpeed's name of the checkpoint.
        latest: whether it may be loaded as the newest one.
        stage: stage of ZeRO.
        data_parallel: number of data-parallel ranks.
        client: keys of the client state.
        written: tags of the checkpoints in DeepSpeed's files so far, this one's included.
        unwritten: saves since the files were last written, this one included.
    """

    folder: str
    tag: str
    latest: bool
    stage: int
    data_parallel: int
    client: tuple[str, ...]
    written: tuple[str, ...]
    unwritten: int
    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1


class _Checkpoints:
    """Replaces ``save_checkpoint`` and ``load_checkpoint`` of one DeepSpeed engine."""

    def __init__(
        self, engine: Any, memory: MemoryEngine, files_every: int, state: dict[str, Stateful]
    ) -> None:
        self._engine, self._memory, self._files_every, self._state = engine, memory, files_every, state
        self._save, self._load = engine.save_checkpoint, engine.load_checkpoint
        self._stage = int(engine.zero_optimization_stage())
        self._step = -1  # step of the newest snapshot
        self._unwritten = 0
        self._written: tuple[str, ...] = ()
        self._cached = self._everywhere(_cache_answers())
        if not self._cached:
            self._say(
                "checkpoints go to DeepSpeed's files only: not all ranks were started by `keepstep run`"
            )

    def save(
        self,
        save_dir: str,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        *args: Any,
        files: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """DeepSpeed's ``save_checkpoint``. ``files``: whether it goes to files, too; None: as `install` was told."""
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        client: dict[Any, Any] = dict(client_state or {})
        for key in client:
            if not isinstance(key, str) or key == STATES:
                raise CheckpointError(
                    f"client_state has a key {key!r}: take text, and not keepstep's own {STATES!r}"
                )
        self._unwritten += 1
        due = 0 < self._files_every <= self._unwritten if files is None else files
        if due:
            self._written = (*self._written, tag)[-_MOST_TAGS:]
        if self._cached:
            about = _About(
                folder=os.path.realpath(save_dir),
                tag=tag,
                latest=save_latest,
                stage=self._stage,
                data_parallel=self._engine.seq_dp_world_size,
                client=tuple(client),
                written=self._written,
                unwritten=self._unwritten,
            )
            self._keep(about, client, args, kwargs)
            if not due:
                return True
        self._unwritten = 0
        table = {STATES: self._table()} if self._state else {}
        return self._save(save_dir, tag, {**client, **table}, save_latest, *args, **kwargs)

    def load(self, load_dir: str, tag: object = None, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        """DeepSpeed's ``load_checkpoint``, from memory if all ranks have a checkpoint there and no file is newer."""
        options = signature(self._load).bind(load_dir, tag, *args, **kwargs)
        options.apply_defaults()
        found = self._in_memory(load_dir, tag, options.arguments) if self._cached else None
        if found:
            return self._resume(*found, load_dir, args, kwargs)
        path, client = self._load(load_dir, tag, *args, **kwargs)
        if path is None:
            return path, client
        loaded = os.path.relpath(os.path.dirname(path), load_dir)
        self._written, self._unwritten = (loaded,), 0
        self._say(f"checkpoint {loaded} was loaded from DeepSpeed's files in {load_dir}")
        states = client.pop(STATES, None)
        if self._state and not isinstance(states, dict):
            self._say(f"checkpoint {loaded} holds no {', '.join(self._state)}: it was written without them")
        elif self._state:
            row = cast("dict[int, Any]", states).get(dist.get_rank())
            if row is None:
                raise CheckpointError(f"checkpoint {loaded} holds no states of rank {dist.get_rank()}")
            self._take_states(unpack(row))
        return path, client

    def _keep(
        self, about: _About, client: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Take a snapshot of everything that DeepSpeed, on any rank, would write and this rank needs to resume."""
        engine = self._engine
        writers = engine.save_non_zero_checkpoint, engine.save_zero_checkpoint
        engine.save_non_zero_checkpoint = True
        engine.save_zero_checkpoint = hasattr(engine.optimizer, "dp_process_group")
        try:
            # DeepSpeed also writes files that it does not give to its engine; these go into a temporary folder.
            with tempfile.TemporaryDirectory(prefix="keepstep-memory-") as folder:
                with self._memory.taking(folder) as states:
                    self._save(folder, about.tag, client, False, *args, **kwargs)
                self._step = max(engine.global_steps, self._step + 1)
                snapshot = {
                    "deepspeed": msgspec.to_builtins(about),
                    "files": to_plain(states),
                    "states": to_plain(
                        {name: one.state_dict() for name, one in self._state.items()}, "state"
                    ),
                }
                checkpoint.save(snapshot, self._step, overlap=False)
        finally:
            engine.save_non_zero_checkpoint, engine.save_zero_checkpoint = writers

    def _in_memory(
        self, load_dir: str, tag: object, options: Mapping[str, Any]
    ) -> tuple[_About, dict[str, Any]] | None:
        """The snapshot that all ranks have, if it is the checkpoint that is asked for."""
        snapshot: dict[str, Any] = {}
        try:
            step = checkpoint.load(snapshot)
        except CheckpointError as error:  # `load` raises on all ranks or on none
            self._say(f"no checkpoint is taken from memory: {error}")
            return None
        if step is None:
            return None
        self._step = step
        about = None
        try:
            about = msgspec.convert(snapshot.get("deepspeed"), _About)
            why = self._unfit(about, load_dir, tag, options)
        except msgspec.ValidationError as error:
            why = f"it is not one of this integration ({error})"
        if self._everywhere(not why) and about:
            return about, snapshot
        self._say(f"the checkpoint in memory is not taken: {why or 'another rank cannot use it'}")
        return None

    def _unfit(self, about: _About, load_dir: str, tag: object, options: Mapping[str, Any]) -> str:
        """The reason why a checkpoint in memory is not the one that is asked for; "" when it is."""
        if self._engine.load_universal_checkpoint():
            return "a universal checkpoint is asked for"
        if self._stage == 3 and not options.get("load_optimizer_states", True):
            return "without optimizer states, DeepSpeed reads the files of all ranks (ZeRO-3)"
        if about.folder != os.path.realpath(load_dir):
            return f"it was saved for {about.folder}"
        if (about.stage, about.data_parallel) != (self._stage, self._engine.seq_dp_world_size):
            return f"it is of {about.data_parallel} data-parallel ranks and ZeRO stage {about.stage}"
        if tag is not None:
            return "" if str(tag) == about.tag else f"it is {about.tag}, and {tag} is asked for"
        if not about.latest:
            return f"it is {about.tag}, saved with save_latest=False, and the latest is asked for"
        latest = _latest(load_dir)
        if latest and latest not in about.written:
            return f"it is {about.tag}, and {load_dir}/latest says {latest}, which was written after it"
        return ""

    def _resume(
        self,
        about: _About,
        snapshot: dict[str, Any],
        load_dir: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[str | None, Any]:
        states = snapshot["files"]
        with tempfile.TemporaryDirectory(prefix="keepstep-memory-") as folder:
            # DeepSpeed checks that the files exist before it asks its engine to load them.
            for name in states:
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                Path(folder, name).touch()
            with self._memory.giving(folder, states):
                path, client = self._load(folder, about.tag, *args, **kwargs)
            if path is None:
                raise CheckpointError(f"DeepSpeed did not load {about.tag} from memory: see what it says")
            path = os.path.join(load_dir, os.path.relpath(path, folder))
        self._written = about.written
        self._unwritten = 0 if _latest(load_dir) == about.tag else about.unwritten
        if self._stage < 3:
            client = self._as_the_writer_has(client, about.client)
        self._take_states(from_plain(snapshot["states"], "state"))
        self._say(f"checkpoint {about.tag} was loaded from memory")
        return path, client

    def _as_the_writer_has(self, client: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
        """The client state of the first data-parallel rank, which all of them would find in DeepSpeed's one file."""
        own = pack({key: client.pop(key) for key in keys if key in client})
        return {**client, **unpack(self._gather(own, self._engine.seq_data_parallel_group)[0])}

    def _table(self) -> dict[int, torch.Tensor]:
        """The packed states of the ranks that will read the client state which this rank writes, by rank."""
        own = pack({name: one.state_dict() for name, one in self._state.items()})
        if self._stage == 3:  # each rank writes a file of its own
            return {dist.get_rank(): own}
        return dict(enumerate(self._gather(own)))

    def _take_states(self, states: dict[str, Any]) -> None:
        lacking = sorted(self._state.keys() - states.keys())
        if lacking:
            raise CheckpointError(
                f"the checkpoint holds no {', '.join(lacking)}: load one saved with the same `state`"
            )
        for name, one in self._state.items():
            one.load_state_dict(states[name])

    def _gather(self, row: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """The rows of bytes of all ranks in the group, by default of the job. Collective in the group."""
        device = self._engine.device
        length = torch.tensor([row.numel()], dtype=torch.int64, device=device)
        lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
        _collective.all_gather(lengths, length, group)
        counts = [int(one.item()) for one in lengths]
        padded = torch.nn.functional.pad(row, (0, max(counts) - row.numel())).to(device)
        rows = [torch.empty_like(padded) for _ in counts]
        _collective.all_gather(rows, padded, group)
        return [one[:count].cpu().clone() for one, count in zip(rows, counts, strict=True)]

    def _everywhere(self, true: bool) -> bool:
        """Whether ``true`` is true on all ranks. Collective."""
        word = torch.tensor([int(true)], dtype=torch.int64, device=self._engine.device)
        _collective.all_reduce(word, _collective.ReduceOp.MIN)
        return bool(word.item())

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"keepstep: {text}", file=sys.stderr, flush=True)


_collective = cast("Any", dist)


def _latest(folder: str) -> str:
    """The tag of the newest checkpoint in DeepSpeed's files; "" when there is none."""
    try:
        return Path(folder, "latest").read_text().strip()
    except OSError:
        return ""


def _cache_answers() -> bool:
    try:
        ask(os.environ.get(ADDRESS, ""), Open(int(os.environ.get("RANK", "0")))).close()
    except CheckpointError:
        return False
    return True


def _why_not(engine: Any) -> str:
    """The reason why this engine's checkpoints cannot be kept in memory; "" when they can."""
    needed = (
        "checkpoint_engine",
        "save_non_zero_checkpoint",
        "save_zero_checkpoint",
        "seq_data_parallel_group",
    )
    for name in needed:
        if not hasattr(engine, name):
            version = getattr(import_module("deepspeed"), "__version__", "?")
            return f"DeepSpeed {version} has no engine.{name}; 0.19 does"
    if isinstance(engine.module, import_module("deepspeed.runtime.pipe.module").PipelineModule):
        return "pipeline stages are written by layers, each by one rank only"
    if engine.mp_world_size > 1:
        return "with model parallelism each rank reads a file of another"
    if engine.has_moe_layers:
        return "experts are written each by one rank only"
    if engine.zero_elastic_checkpoint():
        return "with elastic_checkpoint each rank reads the files of all"
    param = engine.zero_offload_param()
    if engine.zero_nvme_offload_optimizer() or (param is not None and param.device == "nvme"):
        return "states on NVMe are not given to the checkpoint engine"
    return ""
