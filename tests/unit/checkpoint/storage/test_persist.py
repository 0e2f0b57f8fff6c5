"""States written to storage and read back: what is whole, what is not, and that plain tools read it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from io import BytesIO
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from tests.manual_clock import ManualClock
from tests.unit.checkpoint.stored_states import Cache, newest, rebuilt, same, sample_state, taken

from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.backend import LocalStorage, Readable, Storage, open_storage
from keepstep.checkpoint.storage.manifest import MANIFEST, folder_name
from keepstep.checkpoint.storage.persist import Incomplete, Persister, conclude, remove, write_shard
from keepstep.checkpoint.storage.persist_plan import PersistPlan
from keepstep.checkpoint.storage.read import read_shard, scan, verify
from keepstep.core.errors import CheckpointError

KEY = Key(2, 7)


def store(storage: Storage, key: Key = KEY, world_size: int = 2) -> None:
    for rank in range(world_size):
        header, data = taken(sample_state(rank), key.step, rank, world_size, key.incarnation)
        write_shard(storage, header, memoryview(data))
    conclude(storage, key, range(world_size), world_size, leader=True)


@pytest.fixture(params=["path", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "path":
        return open_storage(str(tmp_path / "new" / "run"))
    return open_storage(f"memory://{tmp_path.name}")


def test_a_state_comes_back_to_the_last_bit(storage: Storage) -> None:
    store(storage)
    (step,) = scan(storage)
    assert step.whole
    assert step.manifest
    assert list(verify(storage, step.manifest)) == []
    for rank in range(2):
        shard = read_shard(storage, step.manifest, rank)
        found = rebuilt(shard.header, shard.data)
        assert same(found, sample_state(rank))
        assert found["model"]["tied"].data_ptr() == found["model"]["weight"].data_ptr()


def test_safetensors_and_sha256sum_read_it(tmp_path: Path) -> None:
    store(LocalStorage(tmp_path))
    folder = tmp_path / folder_name(KEY)
    tensors = load_file(folder / "rank-00001.safetensors")
    state = sample_state(1)
    assert tensors["model.weight"].equal(state["model"]["weight"])
    assert tensors["model.bf16"].equal(state["model"]["bf16"])
    assert tensors["optimizer.state.0.exp_avg"].equal(state["optimizer"]["state"][0]["exp_avg"])
    assert tensors["flat"].equal(state["flat"])
    assert tensors["late"].equal(state["late"])
    assert tensors["model.transposed#memory"].view(6, 3).t().equal(state["model"]["transposed"])
    assert tensors["odd.bool"].equal(state["odd"]["bool"])
    assert tuple(tensors["odd.c128"].shape) == (3, 16)
    assert "model.tied" not in tensors
    with safe_open(folder / "rank-00001.safetensors", "pt") as opened:
        assert opened.metadata()["step"] == "7"
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert entry == {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert sorted(os.listdir(folder)) == sorted([*manifest["files"], MANIFEST])
    assert len(manifest["files"]) == 4


def test_a_step_counts_only_with_its_manifest(storage: Storage) -> None:
    header, data = taken(sample_state(), 7, 0, 2, 2)
    write_shard(storage, header, memoryview(data))
    with pytest.raises(Incomplete, match=r"rank-00001.safetensors is not there yet"):
        conclude(storage, KEY, [0], 2, leader=True)
    (step,) = scan(storage)
    assert not step.whole
    assert step.problems == ("step-0000000007-i0002: has no manifest, it was not written to the end",)
    store(storage)
    assert scan(storage)[0].whole


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


DAMAGE = {
    "flipped data": (lambda f: flip(f / "rank-00000.safetensors"), "rank-00000.safetensors: its bytes are not"),
    "flipped table": (lambda f: flip(f / "rank-00000.safetensors", 30), "rank-00000.safetensors: its bytes are"),
    "flipped header": (lambda f: flip(f / "rank-00000.json", 200), "rank-00000.json: its bytes are not"),
    "truncated": (lambda f: os.truncate(f / "rank-00000.safetensors", 100), "safetensors: has 100 bytes instead of"),
    "longer": (lambda f: lengthen(f / "rank-00000.json"), "rank-00000.json: has"),
    "missing": (lambda f: (f / "rank-00000.json").unlink(), "rank-00000.json: missing"),
    "foreign": (lambda f: (f / "rank-00009.json").touch(), "rank-00009.json: foreign"),
    "folder": (lambda f: (f / "deep").mkdir(), "deep: foreign"),
    "swapped": (lambda f: shutil.copy(f / "rank-00001.json", f / "rank-00000.json"), "rank-00000.json: "),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "has no manifest"),
    "half a manifest": (lambda f: os.truncate(f / MANIFEST, 100), "manifest.json: cannot be read"),
    "link": (lambda f: link(f / "rank-00000.json"), "rank-00000.json: has"),
    "pipe": (lambda f: [(f / "rank-00000.json").unlink(), os.mkfifo(f / "rank-00000.json")], "rank-00000.json: has 0"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_in_a_line_and_the_step_before_is_taken(damage: str, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    store(storage, Key(2, 6))
    store(storage)
    spoil, said = DAMAGE[damage]
    spoil(tmp_path / folder_name(KEY))
    found, refused = newest(storage, 0, world_size=2)
    assert found
    assert found.header.step == 6
    assert len(refused) == 1
    assert said in refused[0]
    assert "\n" not in refused[0]
    step = scan(storage)[0]
    assert step.problems or (step.manifest and list(verify(storage, step.manifest)))


def test_a_shard_of_another_world_is_not_taken(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    store(storage)
    assert newest(storage, 0, world_size=4) == (
        None,
        ["step-0000000007-i0002: was saved by 2 ranks, the job has 4"],
    )


def test_a_torn_source_is_not_certified(tmp_path: Path) -> None:
    header, data = taken(sample_state(), 7)
    with pytest.raises(CheckpointError, match="storage 0 in the cache is not what the snapshot"):
        write_shard(LocalStorage(tmp_path), header, memoryview(bytes(len(data))))
    assert not (tmp_path / folder_name(Key(0, 7)) / "rank-00000.json").exists()


def persister(storage: Storage, cache: Cache, ranks: tuple[int, ...], world_size: int) -> Persister:
    plan = PersistPlan(ranks, leader=0 in ranks)
    return Persister(plan, storage, cache.source, world_size=world_size)


def test_two_nodes_bring_a_step_to_storage(storage: Storage) -> None:
    cache = Cache()
    nodes = [persister(storage, cache, (0, 1), 3), persister(storage, cache, (2,), 3)]
    here = [(KEY, 0), (KEY, 1)]
    for rank in range(3):
        cache.seal(KEY, rank, 3, sample_state(rank))
    for node, cached in zip(nodes, (here, [(KEY, 2)]), strict=True):
        assert node.follow(cached) == frozenset()
        node.want([KEY])
        assert node.follow(cached) == {KEY}
    assert nodes[0].work()
    assert nodes[0].work()
    assert nodes[0].work()
    assert nodes[0].follow(here) == {KEY}
    assert nodes[1].work()
    assert nodes[1].work()
    again = persister(storage, cache, (0, 1), 3)  # the agent died and came back
    again.want([KEY])
    again.follow(here)
    while again.work():
        pass
    assert again.whole == {KEY}
    assert again.follow(here) == frozenset()
    assert scan(storage)[0].whole


def test_a_thread_of_its_own_and_removal_of_what_is_not_wanted(tmp_path: Path) -> None:
    storage, cache = LocalStorage(tmp_path), Cache()
    for step in (1, 2):
        store(storage, Key(0, step), world_size=1)
    key = Key(0, 3)
    cache.seal(key, 0, 1, sample_state())
    node = persister(storage, cache, (0,), 1)
    node.start()
    try:
        node.want([key, Key(0, 2)], remove_others=True)
        node.follow([(key, 0)])
        for _ in range(6000):
            if storage.folders() == [folder_name(Key(0, 2)), folder_name(key)] and node.whole == {
                key,
                Key(0, 2),
            }:
                break
            time.sleep(0.01)
    finally:
        node.stop()
    assert [step.key.step for step in scan(storage) if step.whole] == [3, 2]
    assert storage.folders() == [folder_name(Key(0, 2)), folder_name(key)]


class Misread(LocalStorage):
    """Errs, or changes a byte, whenever the manifest of a step is read."""

    step: Key | None = None
    errs = True

    def open(self, folder: str, name: str) -> Readable:
        if self.step and (folder, name) == (folder_name(self.step), MANIFEST):
            if self.errs:
                raise OSError(116, "Stale file handle")
            return BytesIO(b"{" + (self._root / folder / name).read_bytes()[1:-9])  # type: ignore[return-value]
        return super().open(folder, name)


@pytest.mark.parametrize("errs", [True, False])
def test_a_step_that_was_misread_once_is_not_removed(tmp_path: Path, errs: bool) -> None:
    storage, cache = Misread(tmp_path), Cache()
    for step in (1, 2, 3):
        store(storage, Key(0, step), world_size=1)
    storage.step, storage.errs = Key(0, 2), errs
    plan, clock = PersistPlan((0,), leader=True), ManualClock()
    node = Persister(plan, storage, cache.source, world_size=1, clock=clock)
    node.want([Key(0, 1), Key(0, 3)], remove_others=True)  # as who keeps two and cannot read the one between
    for _ in range(5):
        node.work()
        clock.advance(10.0)
    assert len(storage.folders()) == 3
    storage.step = None
    assert scan(storage)[1].whole


def test_a_step_with_a_file_that_is_not_ours_is_not_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    store(storage)
    (tmp_path / folder_name(KEY) / "My Notes").touch()
    with pytest.raises(CheckpointError, match="'My Notes': is no name"):
        remove(storage, KEY)
    assert (tmp_path / folder_name(KEY) / MANIFEST).exists()
    (tmp_path / folder_name(KEY) / "My Notes").unlink()
    remove(storage, KEY)
    assert storage.folders() == []


def test_drafts_of_a_writer_that_died_do_not_pile_up(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / ".file.draft").write_bytes(b"half")
    storage.write("step", "file", [b"whole"])
    assert [path.name for path in (tmp_path / "step").iterdir()] == ["file"]
