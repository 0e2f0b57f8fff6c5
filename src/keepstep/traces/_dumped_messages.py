"""How far ranks are in the messages between them, by their dumps.

torch numbers messages for each rank and group, whoever is the other end, so the two ends of a message mostly have
different numbers. They are matched by their order instead: no message overtakes another between the same two ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keepstep.core.events import MESSAGES, Op, ends_of
from keepstep.core.summary import StreamProgress
from keepstep.traces.dump_sets import Dump, DumpedCall

Ends = tuple[str, int, int]  # group, sender, receiver
Heads = Mapping[int, Sequence[DumpedCall]]  # by rank, what its device is in
_OPPOSITE = {Op.SEND: Op.RECV, Op.RECV: Op.SEND}


def ends(rank: int, call: DumpedCall) -> Ends:
    """Between which ranks a rank's message goes; (group, -1, -1) for a collective."""
    return call.group, *ends_of(call.op, rank, call.peer)


def numbered(heads: Heads) -> dict[Ends, int]:
    """One number for both ends of each message that a device is in: the receiver's, if that is in it."""
    found: dict[Ends, int] = {}
    for op in (Op.SEND, Op.RECV):
        for rank, calls in heads.items():
            found.update((ends(rank, call), call.seq) for call in calls if call.op is op and call.peer >= 0)
    return found


def messages_of(
    dumps: Mapping[int, Dump], heads: Heads, numbers: Mapping[Ends, int]
) -> dict[int, list[StreamProgress]]:
    """How far each rank is in its messages, by kind and peer.

    Args:
        heads: what each rank's device is in.
        numbers: the numbers of the messages among these, from `numbered`.
    """
    inside = {(ends(rank, call), call.op) for rank, calls in heads.items() for call in calls}
    done: dict[int, dict[tuple[Ends, Op], list[int]]] = {rank: {} for rank in dumps}
    for rank, dump in dumps.items():
        for call in dump.entries:
            if call.op in MESSAGES and call.peer >= 0:
                of_kind = done[rank].setdefault((ends(rank, call), call.op), [])
                of_kind += [call.seq] * call.done
    for rank, calls in heads.items():
        for call in calls:
            if call.peer in done:
                done[call.peer].setdefault((ends(rank, call), _OPPOSITE.get(call.op, call.op)), [])
    found: dict[int, list[StreamProgress]] = {rank: [] for rank in dumps}
    for rank, of_rank in done.items():
        for (pair, op), mine in of_rank.items():
            group, source, target = pair
            peer = target if op is Op.SEND else source
            number = numbers.get(pair)
            if number is None:  # nobody is in such a message
                started = completed = max(mine, default=0)
            else:
                theirs = done[peer].get((pair, _OPPOSITE[op]), []) if peer in done else []
                known = peer in dumps and dumps[rank].is_whole and dumps[peer].is_whole
                is_through = (pair, op) not in inside and known and len(mine) > len(theirs)
                started = number if is_through or (pair, op) in inside else number - 1
                completed = number if is_through else number - 1
            found[rank].append(StreamProgress(group, int(op), peer, started, completed))
    return found
