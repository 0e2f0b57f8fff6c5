"""The agent's part in the comparison of replicas: it tells the controller the checksums that are in the node's cache.

Workers sum every byte that they save, so nothing is computed here: the table of checksums is read from each sealed slot
and told, as far as it is of parameters and optimizer states. All this runs in a thread beside the agent's loop.
"""

from __future__ import annotations

import itertools
import logging
import math
import struct
import threading
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from keepstep.agent.services.node_backups import unexpected
from keepstep.checkpoint import native
from keepstep.checkpoint.header import ITEM_BYTES, StateHeader, TensorEntry, decode_header, tensor_paths
from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.slots import Key
from keepstep.wire.messages import (
    MOST_FAMILIES,
    MOST_KEPT,
    Checksums,
    Message,
    NamedTensor,
    RankChecksums,
    TensorFamily,
)

logger = logging.getLogger("keepstep.agent")

_LOOK_S = 0.05
_IDLE_LOOK_S = 0.5  # while nothing was saved yet
_PACE_S = 10.0  # how often it is considered what share of the saves is told
_CPU_SHARE = 0.01  # most of one core that this may take
_BYTES_PER_S = 4 << 20  # most that all nodes together may send to the controller
_BURST_BYTES = 32 << 20  # bytes that may be sent at once
_RAREST = 16  # one save of 2**16 is told at the least
_MOST_LAYOUTS = 64
_LEAST_LOOKED_AT, _MOST_LOOKED_AT = 8, 256  # numbers of a tensor that tell whether a gradient has changed it
_MOST_LOOKS = 32  # saves in which that is looked for: after its first step a parameter shows nothing yet
_LONGEST = 200  # most characters of a name or kind


class _Parts(msgspec.Struct):
    """The parts of a header's JSON that tell its layout, unread."""

    tree: msgspec.Raw
    tensors: msgspec.Raw
    families: msgspec.Raw = msgspec.Raw(b"[]")
    decaying: msgspec.Raw = msgspec.Raw(b"[]")


_parts = msgspec.json.Decoder(_Parts)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(slots=True)
class _Layout:
    """What is told of a rank's states as long as they have these ``parts``."""

    parts: tuple[bytes, bytes, bytes, bytes]
    families: int  # their digest; 0: there is nothing to tell
    storages: tuple[int, ...]  # storages with a checksum, in the order in which these are told
    undriven: frozenset[int]  # families that decay and in which no gradient has shown yet
    looks: int = 1  # how often that was looked for


class ChecksumTeller:
    """Tells checksums of one node. ``send`` is called from a thread and must pass messages to the agent's loop."""

    def __init__(
        self,
        states: CachedStates,
        ranks: Collection[int],
        node_rank: int,
        world_size: int,
        send: Callable[[Message], None],
    ) -> None:
        self._states, self._ranks, self._node_rank = states, tuple(sorted(ranks)), node_rank
        self._world_size, self._send = world_size, send
        self._newest: Key | None = None
        self._layouts: dict[int, _Layout] = {}  # by rank
        self._families: dict[int, tuple[TensorFamily, ...]] = {}  # by digest
        self._pace = Pace(time.monotonic())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keepstep-checksums", daemon=True)

    def start(self) -> None:
        """Begin to watch the cache."""
        self._thread.start()

    def stop(self) -> None:
        """Stop soon."""
        self._stopped.set()

    def families(self, digest: int) -> tuple[TensorFamily, ...]:
        """The families with this digest, for a controller that asks; () when they are not known."""
        return self._families.get(digest, ())

    def doubt(self, key: Key | None) -> None:
        """Have the node's workers avoid the snapshot and later ones, and keep the one before if there is memory.

        Raises CheckpointError when the cache does not answer.
        """
        self._states.board.doubt(key)

    def look(self) -> None:
        """Tell the checksums of what all ranks of the node have saved since the last look."""
        held = frozenset[Key].intersection(*map(self._states.held, self._ranks))
        for key in sorted(one for one in held if self._newest is None or one > self._newest):
            self._newest = key
            if self._pace.takes(key):
                begun_s = time.thread_time()
                told = self._read(key)
                nbytes = sum(len(row.checksums) for row in told) * self._world_size / len(self._ranks)
                if told and self._pace.affords(nbytes, time.monotonic()):
                    self._send(Checksums(self._node_rank, key.pack(), told))
                self._pace.spent(time.thread_time() - begun_s, nbytes)
        self._pace.tick(time.monotonic())

    def _run(self) -> None:
        complaint = ""
        while not self._stopped.wait(_IDLE_LOOK_S if self._newest is None else _LOOK_S):
            try:
                self.look()
                complaint = ""
            # The cache may end before the agent, and memory or descriptors may run out.
            except Exception as error:  # noqa: PERF203
                if str(error) != complaint:
                    logger.warning("checksums: %s", error, exc_info=unexpected(error))
                complaint = str(error)

    def _read(self, key: Key) -> tuple[RankChecksums, ...]:
        """The checksums of one snapshot, ranks that have the same together; () when a rank has overwritten it."""
        rows: dict[tuple[int, bytes], list[int]] = {}
        for rank in self._ranks:
            found = self._states.glance(key, rank)
            if found is None:
                return ()
            text, table = found
            layout = self._layout(key, rank, text)
            if layout is None:
                return ()
            sums = array("Q", table)
            chosen = array("Q", [sums[one] for one in layout.storages]).tobytes()
            rows.setdefault((layout.families, chosen), []).append(rank)
        return tuple(RankChecksums(tuple(ranks), *row) for row, ranks in rows.items())

    def _layout(self, key: Key, rank: int, text: bytes) -> _Layout | None:
        """What is told of a rank's states; None when this one was overwritten meanwhile."""
        read = _parts.decode(text)
        parts = bytes(read.tree), bytes(read.tensors), bytes(read.families), bytes(read.decaying)
        known = self._layouts.get(rank)
        same = known is not None and known.parts[1:] == parts[1:] and _same_tensors(known.parts[0], parts[0])
        if known and same and (not known.undriven or known.looks >= _MOST_LOOKS):
            return known
        header = decode_header(text)
        undriven = self._undriven(key, rank, header, known.undriven if known and same else header.decaying)
        if undriven is None:
            return None
        if known and same and undriven == known.undriven:
            known.looks += 1
            return known
        families, storages = _families(header, undriven, self._world_size)
        digest = (native.checksum(msgspec.msgpack.encode(families)) >> 2 or 1) if families else 0
        if digest not in self._families and len(self._families) >= _MOST_LAYOUTS:
            digest, storages = 0, ()
        elif digest:
            self._families[digest] = families
        looks = known.looks + 1 if known and same else 1
        self._layouts[rank] = _Layout(parts, digest, storages, undriven, looks)
        return self._layouts[rank]

    def _undriven(
        self, key: Key, rank: int, header: StateHeader, families: Collection[int]
    ) -> frozenset[int] | None:
        """Of these families, which weight decay may change alone, those in which no gradient shows.

        In few numbers none can show; such a parameter is counted with others of its module, which it is used with.
        """
        found: dict[int, bool | None] = {}
        few: set[int] = set()
        on = {one.storage: one for one in reversed(header.tensors)} if families else {}
        for number in families:
            own, *kept = (on.get(storage) for storage in header.families[number])
            likes = [
                one for one in kept if own and one and (one.shape, one.stride) == (own.shape, own.stride)
            ]
            found[number] = self._is_driven(key, rank, header, own, likes) if own and likes else False
            if found[number] is None:
                return None
            if own and likes and math.prod(own.shape) < _LEAST_LOOKED_AT:
                few.add(number)
        undriven = frozenset(number for number, is_driven in found.items() if not is_driven)
        if few:
            modules = _modules(header)
            driven = {modules[number] for number in header.decaying if number not in undriven}
            undriven -= {number for number in few if modules[number] in driven}
        return undriven

    def _is_driven(
        self, key: Key, rank: int, header: StateHeader, own: TensorEntry, kept: Sequence[TensorEntry]
    ) -> bool | None:
        count = max(min(_MOST_LOOKED_AT, own.reach_bytes // ITEM_BYTES[own.dtype] - own.offset), 0)
        pieces = [
            (
                header.storages[one.storage].offset + one.offset * ITEM_BYTES[one.dtype],
                count * ITEM_BYTES[one.dtype],
            )
            for one in (own, *kept)
        ]
        data = self._states.peek(key, rank, pieces)
        if data is None:
            return None
        values, *others = (_numbers(one.dtype, piece) for one, piece in zip((own, *kept), data, strict=True))
        return any(is_driven(values, other) for other in others)


class Pace:
    """Which saves are told: all of them, or fewer where that would take too much.

    All nodes leave out the same saves, or some nodes more than others but none that those tell.
    """

    def __init__(self, now_s: float) -> None:
        self._since_s, self._cpu_s, self._bytes, self.rarity = now_s, 0.0, 0.0, 0
        self._credit_s, self._credit = now_s, float(_BURST_BYTES)

    def takes(self, key: Key) -> bool:
        """Whether this save is told: one of ``2 ** rarity``."""
        return not (key.step * 0x9E37_79B9_7F4A_7C15 >> 32) & ((1 << self.rarity) - 1)

    def affords(self, nbytes: float, now_s: float) -> bool:
        """Whether so many bytes of all nodes may be sent now; then they count as sent."""
        most = max(_BURST_BYTES, nbytes)
        self._credit = min(self._credit + (now_s - self._credit_s) * _BYTES_PER_S, most)
        self._credit_s = now_s
        if nbytes > self._credit:
            return False
        self._credit -= nbytes
        return True

    def spent(self, cpu_s: float, nbytes: float) -> None:
        """Note what one save takes, whether or not it was sent: here, and of bytes on all nodes."""
        self._cpu_s, self._bytes = self._cpu_s + cpu_s, self._bytes + nbytes

    def tick(self, now_s: float) -> None:
        """Tell fewer saves or more, by what the last seconds have taken."""
        passed_s = now_s - self._since_s
        if passed_s < _PACE_S:
            return
        share = max(self._cpu_s / passed_s / _CPU_SHARE, self._bytes / passed_s / _BYTES_PER_S)
        if share > 1:
            self.rarity = min(self.rarity + math.ceil(math.log2(share)), _RAREST)
        elif share < 0.4 and self.rarity:
            self.rarity -= 1
        self._since_s, self._cpu_s, self._bytes = now_s, 0.0, 0.0


def _same_tensors(old: bytes, new: bytes) -> bool:
    """Whether two trees of headers differ, if at all, in plain values only, not in what tensors they hold where."""
    if old == new:
        return True
    if old[:1] != new[:1] or old[:1] not in (b"{", b"["):
        return old[:1] not in (b"{", b"[") and new[:1] not in (b"{", b"[")
    if old[:1] == b"{":
        before, now = _fields.decode(old), _fields.decode(new)
        pairs = zip(before.values(), now.values(), strict=False)
        return list(before) == list(now) and all(_same_tensors(bytes(one), bytes(two)) for one, two in pairs)
    # A list begins with its tag, or with the key of a pair; a reference to a tensor is a tag and a number.
    items, others = _items.decode(old), _items.decode(new)
    first = bytes(items[0]) if items else b""
    if len(items) != len(others) or not items or first != bytes(others[0]):
        return False
    if first in (b'"tensor"', b'"array"', b'"scalar"'):
        return False
    return all(_same_tensors(bytes(one), bytes(two)) for one, two in zip(items, others, strict=True))


def is_driven(parameter: Sequence[float], kept: Sequence[float]) -> bool:
    """Whether gradients show in what an optimizer keeps for these numbers of a parameter.

    Where weight decay is all that there is, it is the larger, or the smaller, the larger the number is.
    """
    if len(parameter) != len(kept) or len(kept) < _LEAST_LOOKED_AT or not all(map(math.isfinite, kept)):
        return False
    pairs = sorted(zip(parameter, kept, strict=True), key=lambda pair: abs(pair[0]))
    sizes = [abs(other) for _, other in pairs]
    grows = all(after >= before * 0.99 for before, after in itertools.pairwise(sizes))
    shrinks = all(before >= after * 0.99 for before, after in itertools.pairwise(sizes))
    return not (grows or shrinks)


def _modules(header: StateHeader) -> list[str]:
    """For each family the path of what holds its parameter."""
    names = dict(zip((one.storage for one in header.tensors), tensor_paths(header), strict=True))
    return [names.get(family[0], "").rpartition(".")[0] for family in header.families]


def _numbers(dtype: str, data: bytes) -> list[float]:
    if dtype == "bfloat16":
        data, dtype = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2)), "float32"
    form = {"float16": "e", "float32": "f", "float64": "d"}.get(dtype)
    return [one for (one,) in struct.iter_unpack(f"<{form}", data)] if form else []


def _families(
    header: StateHeader, undriven: Collection[int], world_size: int
) -> tuple[tuple[TensorFamily, ...], tuple[int, ...]]:
    """What is told of a state: its families, and the storages of their tensors in the same order."""
    names = tensor_paths(header)
    on: dict[int, list[int]] = {}  # tensors by storage
    for index, tensor in enumerate(header.tensors):
        on.setdefault(tensor.storage, []).append(index)
    families: list[TensorFamily] = []
    storages: list[int] = []
    for number, family in enumerate(header.families[:MOST_FAMILIES]):
        decays = number in undriven
        tensors = [[header.tensors[index] for index in on.get(one, ())] for one in family]
        if len(family) > MOST_KEPT or not all(tensors) or _is_only_copy(tensors[0][0], world_size):
            continue
        families.append(
            tuple(
                NamedTensor(
                    _name([names[index] for index in on[one]]), _kind(parts), _is_single(parts), decays
                )
                for one, parts in zip(family, tensors, strict=True)
            )
        )
        storages += family
    if len({one.name for family in families for one in family}) < len(storages):
        return (), ()  # names that were cut short are alike
    return tuple(families), tuple(storages)


def _is_only_copy(tensor: TensorEntry, world_size: int) -> bool:
    """Whether no other rank can hold the same shard."""
    shard = tensor.shard
    return shard is not None and "R" not in shard.placements and math.prod(shard.mesh_shape) >= world_size


def _is_single(tensors: Sequence[TensorEntry]) -> bool:
    return len(tensors) == 1 and math.prod(tensors[0].shape) == 1


def _name(paths: Sequence[str]) -> str:
    """The name of tensors that share their memory."""
    more = f" and {len(paths) - 1} more in its memory" if len(paths) > 1 else ""
    return paths[0][-_LONGEST:] + more


def _kind(tensors: Sequence[TensorEntry]) -> str:
    """Whatever is the same for copies of these tensors on other ranks: type, sizes, and the shard's place."""
    told: list[Any] = []
    for one in tensors:
        place: list[Any] = []
        if one.shard is not None:
            places = zip(one.shard.placements, one.shard.coordinate, one.shard.mesh_shape, strict=True)
            place = [one.shard.global_shape, *(mesh for mesh in places if mesh[0] != "R")]
        told.append((one.dtype, one.shape, *place))
    text = " ".join(str(one) for one in told)
    return text if len(text) <= _LONGEST else f"{native.checksum(text.encode()):016x}"
