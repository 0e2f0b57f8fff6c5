"""A step of several ranks put together: one safetensors file, a DCP folder; sharded, replicated and differing parts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.unit.checkpoint.stored_states import taken

from keepstep.checkpoint.header import ShardEntry, tensor_paths
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.backend import LocalStorage
from keepstep.checkpoint.storage.export_dcp import export_dcp
from keepstep.checkpoint.storage.export_safetensors import export_safetensors
from keepstep.checkpoint.storage.manifest import Manifest
from keepstep.checkpoint.storage.persist import conclude, write_shard
from keepstep.checkpoint.storage.read import look
from keepstep.core.errors import CheckpointError

KEY = Key(0, 3)
WEIGHT = torch.arange(70.0).view(10, 7)
BF16 = torch.arange(24).view(4, 6).bfloat16()


def part(
    whole: torch.Tensor, words: tuple[str, ...], mesh: tuple[int, ...], at: tuple[int, ...]
) -> torch.Tensor:
    for word, count, index in zip(words, mesh, at, strict=True):
        if word != "R":
            found = whole.chunk(count, dim=int(word[2]))
            whole = found[index] if index < len(found) else whole.narrow(int(word[2]), 0, 0)
    return whole


def store(storage: LocalStorage, *, skip: int = -1, spoil: bool = False) -> Manifest:
    """Four ranks on a 2 × 2 mesh: rows over the first dimension, columns or replicas over the second."""
    mesh = (2, 2)
    shards = {"model.weight": (WEIGHT, ("S(0)", "R")), "model.bf16": (BF16, ("S(0)", "S(1)"))}
    for rank in range(4):
        at = (rank // 2, rank % 2)
        local = {name: part(whole, words, mesh, at).clone() for name, (whole, words) in shards.items()}
        state: dict[str, Any] = {
            "model": {"weight": local["model.weight"], "bf16": local["model.bf16"], "norm": torch.ones(3)},
            "rng": torch.tensor([rank // 2]), "epoch": 4, "who": f"rank {rank // 3}",
        }  # fmt: skip
        state["model"]["tied"] = state["model"]["weight"]
        header, data = taken(state, 3, rank, 4)
        tensors = list(header.tensors)
        for index, path in enumerate(tensor_paths(header)):
            if path in shards:
                whole, words = shards[path]
                entry = ShardEntry(
                    tuple(whole.shape), (), mesh, (), at, ("_S(9, 2)", "R") if spoil else words
                )
                tensors[index] = msgspec.structs.replace(tensors[index], shard=entry)
        write_shard(storage, msgspec.structs.replace(header, tensors=tuple(tensors)), memoryview(data))
    conclude(storage, KEY, [0], 4, leader=True)
    manifest = look(storage, KEY).manifest
    assert manifest
    return manifest


def test_one_safetensors_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    assert export_safetensors(storage, store(storage), tmp_path / "model.safetensors") == 5
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == {"model.weight", "model.bf16", "model.norm", "rng", "rng@rank2"}
    assert found["model.weight"].equal(WEIGHT)
    assert found["model.bf16"].equal(BF16)
    assert found["model.norm"].equal(torch.ones(3))
    assert (found["rng"].item(), found["rng@rank2"].item()) == (0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]


def test_a_dcp_folder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    export_dcp(storage, store(storage), tmp_path / "dcp")
    state: dict[str, Any] = {
        "model": {"weight": torch.zeros(10, 7), "tied": torch.zeros(10, 7), "bf16": torch.zeros(4, 6).bfloat16()},
        "rng": torch.zeros(1, dtype=torch.long), "rng@rank2": torch.zeros(1, dtype=torch.long),
        "epoch": 0, "who": "", "who@rank3": "",
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert state["model"]["weight"].equal(WEIGHT)
    assert state["model"]["tied"].equal(WEIGHT)
    assert state["model"]["bf16"].equal(BF16)
    assert (state["epoch"], state["who"], state["who@rank3"]) == (4, "rank 0", "rank 1")
    assert (state["rng"].item(), state["rng@rank2"].item()) == (0, 1)
    with pytest.raises(CheckpointError, match="is not empty"):
        export_dcp(storage, store(storage), tmp_path / "dcp")


def test_placements_that_do_not_fit_are_said(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    manifest = store(storage, spoil=True)
    with pytest.raises(
        CheckpointError, match=r"placement '_S\(9, 2\)' does not fit a tensor of 2 dimensions"
    ):
        export_safetensors(storage, manifest, tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match="cannot be written: No such file or directory; name another file"
    ):
        export_safetensors(storage, store(storage), tmp_path / "nowhere" / "model.safetensors")
