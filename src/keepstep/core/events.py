"""What a worker records: operations (collective, point-to-point) and phases, each with a start and an end.

The numbers are part of the ring's binary format (``native/ring_format.hpp``): append, never renumber.
"""

from __future__ import annotations

import re
from enum import IntEnum, IntFlag

# Backends that move data on the host: their completed Work is a completed transfer, elsewhere only an enqueued one.
HOST_BACKENDS = frozenset({"gloo", "mpi", "ucc"})


class Kind(IntEnum):
    """The sort of a record."""

    COLLECTIVE = 1
    P2P = 2
    PHASE = 3
    COMMUNICATOR = 4  # an event in the life of a communicator of the device's library; ``op`` is a Life
    DEVICE = 5  # something that the NCCL shim has measured on the compute stream of a GPU; ``op`` is a Device


class Device(IntEnum):
    """What was measured on the GPU; the ``op`` of a DEVICE record, which is written when that is over.

    An ITERATION lasts from one optimizer step's end to the next; its ``peer`` is how many steps the rank had made at
    its end, its ``bytes`` for how many nanoseconds communication blocked the compute stream. ``start_ns`` is when the
    host put the first boundary onto the stream, ``wait_ns`` and ``end_ns`` are when the GPU came to the two. A WAIT is
    one such time; its group is that of the communication. A BLIND iteration replayed ``bytes`` CUDA graphs: what
    communicates in them is not seen, so that it is not known how long that blocked.
    """

    ITERATION = 1
    WAIT = 2
    BLIND = 3


class Op(IntEnum):
    """The operation of a COLLECTIVE or P2P record."""

    ALLREDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALLGATHER = 4
    REDUCE_SCATTER = 5
    ALLTOALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    SEND = 10
    RECV = 11
    PUT = 12
    SIGNAL = 13
    WAIT_SIGNAL = 14


MESSAGES = frozenset({Op.SEND, Op.RECV})
"""Operations between two ranks."""

SYNCHRONISING = frozenset({Op.ALLREDUCE, Op.ALLGATHER, Op.REDUCE_SCATTER, Op.BARRIER, Op.ALLTOALL})
"""Collectives that no member leaves before all members have entered; the root of a broadcast may leave early."""


def ends_of(op: int, rank: int, peer: int) -> tuple[int, int]:
    """(sender, receiver) of a message that ``rank`` records as ``op`` with ``peer``; (-1, -1) for a collective."""
    return (rank, peer) if op == Op.SEND else (peer, rank) if op == Op.RECV else (-1, -1)


class Life(IntEnum):
    """What is done to a communicator; the ``op`` of a COMMUNICATOR record. GROUP ends ``bytes`` grouped calls."""

    INIT = 1
    SPLIT = 2
    SHRINK = 3
    GROW = 4
    REVOKE = 5
    SUSPEND = 6
    RESUME = 7
    FINALIZE = 8
    DESTROY = 9
    ABORT = 10
    ERROR = 11
    GROUP = 12


class Phase(IntEnum):
    """What a rank is doing; the ``op`` of a PHASE record.

    FORWARD is what runs outside every recorded phase: a forward pass, an evaluation or a checkpoint that nothing
    marks, the script's own work. MODEL is the marked forward of a model that trains: nothing else hides there. In
    a HOLD keepstep itself keeps the rank waiting. In a TEARDOWN it ends its process groups, or its script is over:
    nobody waits for what it does then, so that it may take long. Nothing is recorded as AFTER_STEP or AFTER_BACKWARD:
    so agents call a FORWARD of which only that is evident, since an optimizer step, a pause or a backward pass was the
    last to end.
    """

    STARTUP = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    DATA = 4
    EVALUATION = 5
    CHECKPOINT = 6
    GC = 7
    MODEL = 8
    COMPILE = 9
    HOLD = 10
    AFTER_STEP = 11
    AFTER_BACKWARD = 12
    TEARDOWN = 13

    @property
    def title(self) -> str:
        """The name that users know; they do not tell MODEL from FORWARD."""
        return _TITLES.get(self, self.name.lower())


STEP_PHASES = frozenset({Phase.MODEL, Phase.BACKWARD, Phase.OPTIMIZER})
"""Phases that only a rank in the middle of a step is in."""

_TITLES = {
    Phase.MODEL: "forward",
    Phase.AFTER_STEP: "after its last step",
    Phase.AFTER_BACKWARD: "after backward",
}


def phase_title(phase: int) -> str:
    """The title of the phase with this number, "" if there is none."""
    try:
        return Phase(phase).title
    except ValueError:
        return ""


def phase_place(phase: int) -> str:
    """Where a rank in that phase is: ``in forward``, ``after its last step``; "" if there is no such phase."""
    title = phase_title(phase)
    return title if not title or title.startswith("after ") else f"in {title}"


class Flag(IntFlag):
    """The lower 8 bits of a record's ``flags``; the upper 8 tell the element type and the reduction."""

    NONE = 0
    ASYNC = 1  # the caller did not wait in the call itself
    END_BY_WAIT = 2  # the end is when the caller's wait returned, not when the transfer ended
    FAILED = 4  # the operation ended with an error
    SYNC_KNOWN = 8  # torch reported whether the call is asynchronous: ASYNC is no guess
    ENQUEUED = 16  # recorded by the shim: the end is the call's return; peers are ranks of the communicator
    GROUPED = 32  # the operation was in a group of calls: its end is that of the group
    TIMED = 64  # set with ENQUEUED: end of the wait, and end, are when the GPU began and ended the call
    ON_DEVICE = 128  # recorded by the probe: the end is the call's return; the device works on after it


ELEMENTS = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz",
    "float8_e8m0fnu", "uint16", "uint32", "uint64", "qint8", "quint8", "qint32",
)  # fmt: skip
"""Element types by torch's names. Their place here plus 1 is in the 5 bits above a record's flags; 0: not known."""

UNTOLD = "elements"
"""Stands for the element type where only the number of elements is known, which then stands for the bytes."""

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BITWISE", "PREMUL_SUM")
"""Reductions by torch's names. Their place here plus 1 is in the highest 3 bits of ``flags``; 0: not known, or none."""

_ELEMENT_SHIFT, _REDUCTION_SHIFT = 8, 13


def item_bytes(element: str) -> int:
    """The size of one element of this type in bytes."""
    bits = re.search(r"\d+", element)
    return max(int(bits[0]) // 8, 1) if bits else 1


def element_bits(element: str) -> int:
    """The bits of ``flags`` that tell this element type; 0 for one that has no number."""
    return (ELEMENTS.index(element) + 1) << _ELEMENT_SHIFT if element in ELEMENTS else 0


def reduction_bits(reduction: str) -> int:
    """The bits of ``flags`` that tell this reduction; 0 for one that has no number."""
    return (REDUCTIONS.index(reduction) + 1) << _REDUCTION_SHIFT if reduction in REDUCTIONS else 0


def element_of(flags: int) -> str:
    """The element type that a record's ``flags`` tell; "" where it is not known, as in rings of older versions."""
    place = flags >> _ELEMENT_SHIFT & 31
    return ELEMENTS[place - 1] if 0 < place <= len(ELEMENTS) else ""


def reduction_of(flags: int) -> str:
    """The reduction that a record's ``flags`` tell; "" where there is none or it is not known."""
    place = flags >> _REDUCTION_SHIFT & 7
    return REDUCTIONS[place - 1] if place else ""


SET_UP = "set-up"
"""The group in whose name the calls that set up process groups are recorded, as barriers of all ranks."""

TIMEOUT_NOTE = "keepstep: collectives time out after "
"""How a line among a ring's sites begins that tells a group's timeout, in seconds, to readers."""

NCCL_NOTE = "keepstep: NCCL's calls are not recorded: "
"""How a line among a ring's sites begins in which the NCCL shim says why it records nothing."""

WORLD_PEER = -1  # ``peer`` of a record that has none
