"""The methods of ``ProcessGroup`` that are recorded, and what a call of each moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from keepstep.core.events import ELEMENTS, REDUCTIONS, Kind, Op, element_bits, reduction_bits

# Bits of a record's flags by torch's type, and by the number of torch's reduction: the three bitwise ones are one.
ELEMENT_BITS: dict[Any, int] = {
    getattr(torch, name): element_bits(name) for name in ELEMENTS if hasattr(torch, name)
}
_LISTS = (list, tuple)
_REDUCTION_BITS = tuple(reduction_bits(name) for name in (*REDUCTIONS[:5], *["BITWISE"] * 3, "PREMUL_SUM"))


@dataclass(frozen=True, slots=True)
class Method:
    """What one method of ``ProcessGroup`` does, and which of its arguments tell how many bytes it moves."""

    op: Op
    tensors_at: int  # index of the argument whose bytes are counted; -1: the method moves nothing
    per_member: bool = False  # each member of the group brings or gets that many bytes
    kind: Kind = Kind.COLLECTIVE
    peer_at: int = -1  # index of the argument that holds the peer's group rank; -1: there is none
    reduces: bool = False
    uneven: bool = False  # on a device's backend, members may bring unequal parts

    def measure(self, size: int, args: tuple[Any, ...]) -> int:
        """Bytes that a call with ``args`` moves in a group of ``size`` members."""
        if self.tensors_at < 0:
            return 0
        nbytes = _nbytes(args[self.tensors_at])
        return size * nbytes if self.per_member else nbytes

    def content(self, args: tuple[Any, ...]) -> int:
        """Bits of a record's flags for what a call with ``args`` moves; 0 where that is not known. Never raises."""
        if self.tensors_at < 0:
            return 0
        try:
            tensors = args[self.tensors_at]
            while type(tensors) in _LISTS:
                tensors = tensors[0]
            bits = ELEMENT_BITS.get(tensors.dtype, 0)
            if bits and self.reduces:
                number = hash(getattr(args[-1], "reduceOp", None))  # torch's number, in the cheapest way
                bits |= _REDUCTION_BITS[number] if 0 <= number < len(_REDUCTION_BITS) else 0
        except (AttributeError, IndexError, KeyError, TypeError, RuntimeError):
            return 0  # arguments that torch is about to refuse, or that a later version gives in another form
        return bits


def _nbytes(tensors: Any) -> int:
    if not isinstance(tensors, (list, tuple)):
        return tensors.nbytes
    total = 0
    for tensor in cast("list[Any]", tensors):
        total += _nbytes(tensor) if isinstance(tensor, (list, tuple)) else tensor.nbytes
    return total


# What counts as an operation's bytes: the whole buffer that the members share or move (input or output, whichever is
# the larger); for gather and scatter one member's part; for all-to-all what this rank sends. Every member counts the
# same. torch's old and new names of an operation stand side by side.
METHODS: dict[str, Method] = {
    "allreduce": Method(Op.ALLREDUCE, 0, reduces=True),
    "allreduce_coalesced": Method(Op.ALLREDUCE, 0, reduces=True),
    "broadcast": Method(Op.BROADCAST, 0),
    "reduce": Method(Op.REDUCE, 0, reduces=True),
    "allgather": Method(Op.ALLGATHER, 1, per_member=True, uneven=True),
    "allgather_coalesced": Method(Op.ALLGATHER, 1, per_member=True, uneven=True),
    "_allgather_base": Method(Op.ALLGATHER, 0),
    "all_gather_single": Method(Op.ALLGATHER, 0),
    "allgather_into_tensor_coalesced": Method(Op.ALLGATHER, 0),
    "all_gather_single_coalesced": Method(Op.ALLGATHER, 0),
    "reduce_scatter": Method(Op.REDUCE_SCATTER, 0, per_member=True, reduces=True, uneven=True),
    "_reduce_scatter_base": Method(Op.REDUCE_SCATTER, 1, reduces=True),
    "reduce_scatter_single": Method(Op.REDUCE_SCATTER, 1, reduces=True),
    "reduce_scatter_tensor_coalesced": Method(Op.REDUCE_SCATTER, 1, reduces=True),
    "reduce_scatter_single_coalesced": Method(Op.REDUCE_SCATTER, 1, reduces=True),
    "gather": Method(Op.GATHER, 1),
    "scatter": Method(Op.SCATTER, 0),
    "alltoall_base": Method(Op.ALLTOALL, 1),
    "all_to_all_single": Method(Op.ALLTOALL, 1),
    "alltoall": Method(Op.ALLTOALL, 1),
    "barrier": Method(Op.BARRIER, -1),
    "monitored_barrier": Method(Op.BARRIER, -1),
    "send": Method(Op.SEND, 0, kind=Kind.P2P, peer_at=1),
    "recv": Method(Op.RECV, 0, kind=Kind.P2P, peer_at=1),
    "recv_anysource": Method(Op.RECV, 0, kind=Kind.P2P),
}
