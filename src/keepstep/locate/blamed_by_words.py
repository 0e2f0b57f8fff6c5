"""A crash's culprits, by the deaths of ranks and by what ranks and kernels said of it together.

Deaths tell who died first, words tell of what. Words count more where those that died first only told of others, or
told nothing; and nobody is blamed for an error that all ranks have alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from keepstep.core.deaths import DIED
from keepstep.core.incident import Confidence, Culprit, Diagnosis, Link
from keepstep.core.told import Failure, Named

_MOST_DETAIL = 300
# Kinds of errors of the program or of what is installed: who met it first was only first, as with storage.
_OF_ALL = frozenset({
    "import", "syntax", "library-missing", "launch-config", "driver-mismatch", "missing-path", "checkpoint-refused",
})  # fmt: skip
# Nor is a rank to blame where the scheduler ended the job.
_OF_NOBODY = frozenset({"time-limit", "preempted"})


def blame_by_words(
    diagnosis: Diagnosis,
    failure: Failure,
    nodes: Mapping[int, str],
    addresses: Mapping[str, str],
    witnesses: frozenset[int],
) -> Diagnosis:
    """The diagnosis of a crash, with the culprits that the words of its ranks and nodes name.

    Args:
        diagnosis: who is to blame by deaths alone, as `locate_crash` gives it.
        failure: what the words tell.
        nodes: names of nodes by rank; ``addresses``: likewise by their addresses, as far as they are known.
        witnesses: ranks whose deaths were by an error of their own, as far as their last line tells.
    """
    root = failure.root
    if root is None:
        return diagnosis
    if failure.kind in _OF_ALL | _OF_NOBODY or (
        failure.cause_class == "storage" and root.row.role == "cause"
    ):
        return _nobody(diagnosis)
    if not failure.culprits:
        return _without_culprits(diagnosis, failure)
    by_deaths = {one.rank for one in diagnosis.culprits if one.rank is not None}
    by_words = [
        found for found in (_culprit(one, failure, nodes, addresses) for one in failure.culprits) if found
    ]
    if not by_words:
        return diagnosis
    ranks = {one.rank for one in by_words if one.rank is not None}
    on = {nodes.get(rank, "") for rank in by_deaths}
    if by_deaths and (ranks == by_deaths or (not ranks and on == {one.node for one in by_words})):
        return replace(diagnosis, culprits=tuple(_agreed(one, failure) for one in diagnosis.culprits))
    if by_deaths and root.row.role != "cause":
        return diagnosis  # deaths have an order, and states show who was waited for
    if by_deaths & witnesses and failure.confidence != "high":
        return diagnosis
    blamed = {one.rank for one in by_words}
    victims = tuple(sorted((set(diagnosis.victims) | by_deaths) - blamed))
    return replace(diagnosis, culprits=tuple(by_words), victims=victims)


def _without_culprits(diagnosis: Diagnosis, failure: Failure) -> Diagnosis:
    """The diagnosis where all ranks, or most, met the same: nobody of several is to blame."""
    several = len({one.rank for one in diagnosis.culprits}) > 1
    if not several or failure.root is None or failure.root.row.role not in ("cause", "suspect", "exception"):
        return diagnosis
    return _nobody(diagnosis)


def _nobody(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with nobody to blame: it is the program, or what all ranks use."""
    ranks = {one.rank for one in diagnosis.culprits if one.rank is not None}
    return replace(diagnosis, culprits=(), victims=tuple(sorted(ranks.union(diagnosis.victims))), missing=())


def _agreed(culprit: Culprit, failure: Failure) -> Culprit:
    """A culprit whom deaths and words name alike."""
    sure: Confidence = "high" if failure.confidence == "high" else culprit.confidence
    said = _said(failure)
    known = said[:40] in culprit.detail
    detail = culprit.detail if known else "; ".join(filter(None, (culprit.detail, said)))
    return replace(culprit, confidence=sure, detail=detail[:_MOST_DETAIL])


def _said(failure: Failure) -> str:
    return failure.root.text.strip() if failure.root else ""


def _culprit(
    named: Named, failure: Failure, nodes: Mapping[int, str], addresses: Mapping[str, str]
) -> Culprit | None:
    """A culprit as incidents have it; None where the words name nobody whom the job knows."""
    root = failure.root
    assert root is not None
    rank = named.rank
    if named.path:
        return None
    if rank is None and named.thing and root.speaker.rank is not None:
        rank = root.speaker.rank  # the kernel names the process
    if rank is not None and nodes and rank not in nodes:
        return None
    detail = "; ".join(filter(None, (named.thing, _said(failure))))[:_MOST_DETAIL]
    if named.peer:
        other = named.peer if named.peer in nodes.values() else addresses.get(named.peer, "")
        if named.node and other:
            return Culprit(
                link=Link((_rank_on(named.node, nodes), _rank_on(other, nodes)), (named.node, other)),
                confidence=failure.confidence,
                cause="network",
                detail=detail,
            )
        return Culprit(None, None, named.node, "", 0.0, failure.confidence, "network", f"{named}: {detail}")
    if rank is not None:
        node = named.node or nodes.get(rank, "")
        return Culprit(rank, None, node, "", 0.0, failure.confidence, DIED, detail)
    if named.node:
        return Culprit(None, None, named.node, "", 0.0, failure.confidence, failure.kind, detail)
    return None


def _rank_on(node: str, nodes: Mapping[int, str]) -> int:
    return min((rank for rank, name in nodes.items() if name == node), default=-1)
