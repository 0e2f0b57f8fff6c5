"""Whatever the ranks have and whatever is damaged: all end with the same state, the newest that all can have whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.checkpoint.matching import Moment
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.restore.resume import Agreed, Copied, Elsewhere, SaidByAnother, begin, refuse, resume
from keepstep.core.errors import CheckpointError


@dataclass
class Simulated:
    """A rank: what its cache and the other sources have, and which of that is whole."""

    cache: dict[Key, bool]
    sources: dict[Key, bool]
    troubled: bool = False
    unsure: bool = False
    unfinished: int = -1  # incarnation of a step on storage that was not written to the end
    first: frozenset[Key] = frozenset()
    mark: Key | None = None  # the first snapshot in which replicas differ
    states: dict[Key, int] = field(default_factory=dict)  # what it has saved, if anybody wants to know
    moments: dict[Key, int] = field(default_factory=dict)  # when it saved them, if anybody wants to know
    live: Key | None = None
    number: int = 0

    def own(self) -> frozenset[Key]:
        return frozenset(self.cache)

    def begun(self) -> bool:
        return self.cache.keys() <= self.first

    def doubted(self) -> Key | None:
        return self.mark

    def elsewhere(self) -> Elsewhere:
        if self.troubled:
            return Elsewhere(troubles=("storage cannot be listed",))
        newest = max([self.unfinished, *(key.incarnation for key in self.sources)])
        return Elsewhere(frozenset(self.sources), newest, unsure=self.unsure)

    def bring(self, key: Key) -> None:
        if self.troubled or not self.sources.get(key):
            raise CheckpointError("it is damaged")
        self.cache[key] = True

    def copy(self, key: Key) -> Copied:
        self.live = key
        return Copied.WELL if self.cache[key] else Copied.DAMAGED

    def drop(self, key: Key) -> None:
        del self.cache[key]

    def moment(self, key: Key) -> int:
        return self.moments.get(key, 0)

    def wanted(self, key: Key) -> bool:
        return False

    def digest(self, key: Key) -> int:
        return self.states.get(key, 0)


class Said(str):
    """The message of an error, and whether it only refers to another rank."""

    refers: bool

    def __new__(cls, text: str, refers: bool) -> Said:
        said = super().__new__(cls, text)
        said.refers = refers
        return said


keys = st.builds(Key, st.integers(0, 2), st.integers(0, 4))
contents = st.dictionaries(keys, st.booleans(), max_size=5)
ranks = st.lists(st.builds(Simulated, contents, contents), min_size=1, max_size=4)


def run(job: list[Simulated], what=resume) -> list[Agreed | str]:
    """All ranks in step; what each ends with, or the error it raises."""
    for number, rank in enumerate(job):
        rank.number = number
    talks = [what(rank, 1) for rank in job]
    rows: list[list[int]] = []
    ends: list[Agreed | str] = []
    given: list[list[list[int]] | None] = [None] * len(job)
    while True:
        rows, ends = [], []
        for talk, heard in zip(talks, given, strict=True):
            try:
                rows.append(talk.send(heard))
            except StopIteration as end:  # noqa: PERF203
                ends.append(end.value)
            except CheckpointError as error:
                ends.append(Said(str(error), isinstance(error, SaidByAnother)))
        if ends:
            assert not rows, "some ranks ended and others wait for them"
            return ends
        assert len({len(row) for row in rows}) == 1
        given = [rows] * len(job)


@given(ranks)
@settings(max_examples=many(100), deadline=None)
def test_all_ranks_end_with_the_newest_that_all_can_have(job: list[Simulated]) -> None:
    had = [
        {key for key, whole in rank.cache.items() if whole}
        | {key for key, whole in rank.sources.items() if whole}
        for rank in job
    ]
    anything = any(rank.cache or rank.sources for rank in job)
    caches = [set(rank.cache) for rank in job]
    expected = max(set.intersection(*had), default=None)
    newest = {max(cache, default=None) for cache in caches}
    decided = None not in newest and len(newest) == 1
    if decided and all(rank.cache[max(rank.cache)] for rank in job):
        expected = newest.pop()  # what the caches decide needs no other source
    seen = [key for rank in job for key in (*rank.cache, *rank.sources)]
    ends = run(job)
    if expected is None:
        if anything:
            assert sum(isinstance(end, Said) and not end.refers for end in ends) == 1, ends
        else:
            assert ends == [Agreed(None, 1)] * len(job)
        return
    assert all(isinstance(end, Agreed) for end in ends), ends
    for end, rank in zip(ends, job, strict=True):
        assert isinstance(end, Agreed)
        assert end.key == expected == rank.live
        assert end.incarnation > expected.incarnation
        assert end.pending == {key for key in set.intersection(*caches) if key < expected}
    assert len({end.incarnation for end in ends if isinstance(end, Agreed)}) == 1
    if any(expected not in cache for cache in caches):  # all were asked
        assert all(end.incarnation > max(seen).incarnation for end in ends if isinstance(end, Agreed))


saved = st.dictionaries(keys, st.integers(1, 2), max_size=5)


@given(st.lists(saved, min_size=2, max_size=3), st.booleans())
def test_what_was_saved_at_different_moments_is_never_restored_together(
    jobs: list[dict[Key, int]], begun: bool
) -> None:
    job = [
        Simulated(
            dict.fromkeys(own, True),
            {},
            first=frozenset(own if begun else ()),
            moments={key: Moment(number).pack() for key, number in own.items()},
        )
        for own in jobs
    ]
    together = [key for key in jobs[0] if all(own.get(key) == jobs[0][key] for own in jobs)]
    for end in run(job):
        if together:
            assert isinstance(end, Agreed)
            assert end.key == max(together)
        elif begun or not any(jobs):
            assert isinstance(end, Agreed)
            assert (end.key, bool(end.given_up)) == (None, any(jobs))
        else:
            assert isinstance(end, str)


@given(ranks, keys, st.integers(0, 3))
@settings(max_examples=many(100), deadline=None)
def test_a_snapshot_in_which_replicas_differ_is_the_last_resort(
    job: list[Simulated], mark: Key, which: int
) -> None:
    """However many nodes have heard of it; and nothing but what the restore has found damaged is lost."""
    job[which % len(job)].mark = mark
    had = [
        {key for key, whole in rank.cache.items() if whole}
        | {key for key, whole in rank.sources.items() if whole}
        for rank in job
    ]
    common = set.intersection(*had)
    sound = {key for key in common if key < mark or key.incarnation != mark.incarnation}
    for end in run(job):
        if isinstance(end, str):
            assert not common
        elif sound:
            assert end.key is not None
            assert not end.key.follows(mark)
        elif end.key is not None:
            assert end.key == max(common)


@given(ranks, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_states_are_alike_only_when_all_ranks_say_the_same_of_them(
    job: list[Simulated], said: list[int]
) -> None:
    for rank, digest in zip(job, said, strict=False):
        rank.states = dict.fromkeys([*rank.cache, *rank.sources], digest)
    same = len(set(said[: len(job)])) == 1 and said[0] > 0
    for end in run(job):
        assert isinstance(end, str) or end.key is None or end.alike == same


@given(ranks, st.integers(0, 3))
def test_a_source_of_which_nothing_can_be_told_is_never_taken_for_an_empty_one(
    job: list[Simulated], which: int
) -> None:
    job[which % len(job)].troubled = True
    ends = run(job)
    if not any(rank.cache for rank in job):
        assert all(isinstance(end, str) for end in ends), ends


@given(ranks)
def test_beginning_anew_numbers_above_all_that_is_known(job: list[Simulated]) -> None:
    caches = [set(rank.cache) for rank in job]
    known = [key.incarnation for cache in caches for key in cache]
    if not all(caches):
        known += [key.incarnation for rank in job for key in rank.sources]
    ends = run(job, begin)
    for end in ends:
        assert isinstance(end, Agreed)
        assert end.incarnation == max([0, *known]) + 1 if known else end.incarnation == 1
        assert end.key == max(set.intersection(*caches), default=None)


@given(ranks, st.integers(0, 9), st.sampled_from([resume, begin]))
def test_a_rank_without_a_cache_is_waited_for_by_nobody(job: list[Simulated], which: int, what) -> None:  # type: ignore[no-untyped-def]
    without = job[which % len(job)]
    ends = run(
        job, lambda rank, least: refuse("node-3 has no cache") if rank is without else what(rank, least)
    )
    for rank, end in zip(job, ends, strict=True):
        assert isinstance(end, str)
        assert end.startswith("no rank saves or restores a checkpoint: ")
        assert "start `keepstep run` again" in end
        told = (
            "node-3 has no cache" if rank is without else f"the node of ranks {which % len(job)} has no cache"
        )
        assert told in end


def test_a_state_that_fits_no_rank_stops_all() -> None:
    job = [Simulated({Key(0, 1): True}, {}), Simulated({Key(0, 1): True}, {})]
    job[1].copy = lambda key: Copied.IMPOSSIBLE  # type: ignore[method-assign]
    ends = run(job)
    assert all(isinstance(end, Said) and end.refers for end in ends)
    assert ends == ["another rank could not restore its state: see what it says"] * 2


def test_states_of_another_world_size_are_not_taken_for_none() -> None:
    job = [Simulated({}, {}) for _ in range(2)]
    told = "step 7 is of 4 ranks, this job has 2: reshard it"
    job[0].elsewhere = lambda: Elsewhere(incarnation=0, refused=(told,))  # type: ignore[method-assign]
    first, second = run(job)
    assert first == f"there are states, but none that can be had ({told})"
    assert second == "there are states, but none that can be had: see what another rank says"


@given(st.lists(st.booleans(), min_size=2, max_size=4), *[st.booleans()] * 4)
def test_who_died_over_the_first_snapshot_begins_anew(
    sealed: list[bool], later: bool, troubled: bool, unsure: bool, unfinished: bool
) -> None:
    """Unless there is a later one, or it cannot be told what storage has: then nothing is guessed."""
    key = Key(0, 3)
    job = [
        Simulated({key: True} if has else {}, {}, troubled, first=frozenset({key} if not later else ()))
        for has in sealed
    ]
    job[-1].unsure = unsure
    job[0].unfinished = 4 if unfinished else -1
    ends = run(job)
    for end in ends:
        if all(sealed):
            assert isinstance(end, Agreed)
            assert end.key == key
        elif not any(sealed):
            assert isinstance(end, str) == troubled
        elif later or troubled or unsure:
            assert isinstance(end, str)
        else:
            assert isinstance(end, Agreed)
            assert end.key is None
            assert "begins anew" in end.given_up
            assert end.incarnation > (0 if not unfinished else 4)
