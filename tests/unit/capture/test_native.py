"""The native part of the probe, on fakes: what is called, in which order, and whose errors go where."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.twins.capture import python_native

from keepstep.capture._native import Buckets, Here, Hidden, Oldest  # pyright: ignore[reportMissingModuleSource]
from keepstep.capture.patches import Patches
from keepstep.capture.phases import Phases


@pytest.fixture(params=["native", "twin"])
def capture_part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ``Here``, ``Hidden`` and ``Oldest`` a test means: the compiled ones, or their twins in plain Python."""
    if request.param == "twin":
        for name in ("Here", "Hidden", "Oldest"):
            monkeypatch.setattr(request.module, name, getattr(python_native, name))


class FakeOperation:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def __call__(self) -> None:
        self.log.append(f"end {self.name}")

    def waiting(self) -> None:
        self.log.append(f"wait for {self.name}")

    def fail(self) -> None:
        self.log.append(f"fail {self.name}")


class FakeWork:
    def __init__(self, error: BaseException | None = None) -> None:
        self.completed: bool | Exception = False
        self.error = error

    def is_completed(self) -> bool:
        if isinstance(self.completed, Exception):
            raise self.completed
        return self.completed

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


class Job:
    """A recorder, an autograd engine and a process group; ``allreduce`` is what stands in the reducer's group."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.records: list[tuple[int, ...]] = []
        self.stumbles: list[Exception] = []
        self.queued: list[Callable[[], None]] = []
        self.works: list[FakeWork] = []
        self.start: Any = self._start
        self.compiling: object = None
        self.refusal: BaseException | None = None
        self.observed: Any = 0
        self.ways: list[str] = []
        observers = (lambda: False, self._observed)
        self.buckets = Buckets(
            self, self.here, self.queued.append, lambda: self.compiling, observers, 1, 2, -1, 11, {"half": 43}
        )
        whole, direct = functools.partial(self._torchs, "whole"), functools.partial(self._torchs, "direct")
        self.allreduce = self.buckets.call(whole, direct, 5, self._general)

    def _start(self, *fields: int) -> FakeOperation:
        self.records.append(fields)
        return FakeOperation(self.log, str(len(self.records)))

    def stumbled(self, error: Exception) -> None:
        self.stumbles.append(error)

    def here(self) -> int:
        return 7

    def _observed(self) -> Any:
        if isinstance(self.observed, Exception):
            raise self.observed
        return self.observed

    def _torchs(self, way: str, tensors: Any, *options: Any) -> FakeWork:
        assert options == ("options",)
        self.ways.append(way)
        if self.refusal is not None:
            raise self.refusal
        self.works.append(FakeWork())
        return self.works[-1]

    def _general(self, *arguments: Any) -> str:
        return f"general {len(arguments)}"

    def bucket(self, nbytes: int = 64) -> Any:
        return self.allreduce([types.SimpleNamespace(nbytes=nbytes)], "options")


def test_buckets_are_recorded_from_start_to_end() -> None:
    job = Job()
    job.buckets.begin()
    assert job.bucket(64) is job.works[0]
    assert job.bucket(32) is job.works[1]
    assert job.records == [(1, 2, 5, -1, 64, 11, 7), (1, 2, 5, -1, 32, 11, 7)]
    assert len(job.queued) == 1
    job.works[0].completed = True
    job.bucket()
    assert job.log == ["wait for 1", "end 1"]
    job.queued[0]()
    assert job.log[2:] == ["wait for 2", "wait for 3", "end 2", "end 3"]
    job.buckets.over()
    assert len(job.log) == 6
    assert job.stumbles == []


def test_the_flags_tell_the_gradients_type_where_it_is_known() -> None:
    job = Job()
    job.buckets.begin()
    for dtype in ("half", "strange", ["no key"]):
        job.allreduce([types.SimpleNamespace(nbytes=8, dtype=dtype)], "options")
    job.bucket()
    assert [record[5] for record in job.records] == [43, 11, 11, 11]
    assert job.stumbles == []


def test_who_observes_operators_sees_them() -> None:
    job = Job()
    job.buckets.begin()
    for job.observed in (0, 1, True, False):
        job.bucket()
    assert job.ways == ["direct", "whole", "whole", "direct"]
    job.observed = odd = ValueError("odd")
    job.bucket()
    assert job.ways[-1] == "whole"
    assert job.stumbles == [odd]
    assert len(job.records) == 5


def test_each_backward_is_queued_and_located_anew() -> None:
    job = Job()
    for _ in range(2):
        job.buckets.begin()
        job.bucket()
        job.buckets.over()
    assert len(job.queued) == 2
    assert job.log == ["end 1", "end 2"]


def test_what_a_failed_backward_left_is_forgotten() -> None:
    job = Job()
    job.buckets.begin()
    job.bucket()
    job.buckets.begin()
    job.buckets.over()
    assert job.log == []


def test_outside_a_plain_backward_the_general_way_is_taken() -> None:
    job = Job()
    assert job.bucket() == "general 2"
    job.buckets.begin()
    job.buckets.plain = False
    assert job.bucket() == "general 2"
    job.buckets.plain = True
    job.compiling = "callback"
    assert job.bucket() == "general 2"
    job.compiling = None
    job.start = None
    assert job.bucket() == "general 2"
    job.start = job._start
    assert job.allreduce(["no tensor"], "options") == "general 2"
    assert job.allreduce([], "options") == "general 2"
    assert [type(error) for error in job.stumbles] == [AttributeError, IndexError]
    assert job.records == []


def test_an_operation_begun_the_general_way_ends_with_the_others() -> None:
    job = Job()
    job.buckets.begin()
    job.buckets.add(FakeWork(), FakeOperation(job.log, "added"))
    job.queued[0]()
    assert job.log == ["wait for added", "end added"]


def test_torchs_refusal_goes_to_the_caller() -> None:
    job = Job()
    job.buckets.begin()
    job.refusal = ValueError("torch's")
    with pytest.raises(ValueError, match="torch's"):
        job.bucket()
    assert job.log == ["fail 1"]
    assert job.stumbles == []


def test_a_work_that_fails_is_left_to_the_reducer() -> None:
    job = Job()
    job.buckets.begin()
    job.bucket()
    job.bucket()
    job.works[0].error = RuntimeError("peer")
    job.queued[0]()
    assert job.log == ["wait for 1", "wait for 2", "fail 1"]
    assert job.stumbles == []


def test_a_work_that_has_failed_is_no_good_end_and_nothing_after_it_is_waited_for() -> None:
    job = Job()
    job.buckets.begin()
    job.bucket()
    job.bucket()
    job.works[0].completed, job.works[0].error = True, RuntimeError("peer")
    assert job.bucket() is job.works[2]
    job.queued[0]()
    assert job.log == ["wait for 1", "fail 1"]
    job.buckets.begin()
    job.bucket()
    job.queued[1]()
    assert job.log[2:] == ["wait for 4", "end 4"]
    assert job.stumbles == []


def test_a_backward_begun_meanwhile_takes_nothing_from_a_bucket() -> None:
    job = Job()

    class Tensor:
        @property
        def nbytes(self) -> int:
            job.buckets.begin()
            return 64

    job.buckets.begin()
    assert job.allreduce([Tensor()], "options") is job.works[0]
    assert job.records == [(1, 2, 5, -1, 64, 11, 7)]


def test_a_backward_that_raises_keeps_no_works() -> None:
    job = Job()

    def original() -> None:
        job.bucket()
        raise RuntimeError("torch's")

    run_backward = Phases(cast(Any, job), Patches(), job.buckets)._run_backward(original)
    with pytest.raises(RuntimeError, match="torch's"):
        run_backward()
    work = weakref.ref(job.works.pop())
    assert work() is None
    assert not job.buckets.plain


def test_an_interrupt_is_nobodys_to_keep() -> None:
    job = Job()
    job.buckets.begin()
    job.bucket()
    job.works[0].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        job.queued[0]()


def test_an_interrupt_while_a_stumble_is_told_is_the_users() -> None:
    job = Job()
    job.buckets.begin()
    job.bucket()
    job.works[0].completed = ValueError("odd")

    def interrupted(error: Exception) -> None:
        raise KeyboardInterrupt

    job.stumbled = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        job.bucket()


def test_an_odd_work_is_told_and_the_bucket_goes_on() -> None:
    job = Job()
    job.buckets.begin()
    job.bucket()
    odd = job.works[0].completed = ValueError("odd")
    assert job.bucket() is job.works[1]
    assert job.stumbles == [odd]


def test_a_call_holds_nothing_of_its_caller() -> None:
    job = Job()
    native = object()
    held = sys.getrefcount(native)
    call = job.buckets.call(len, len, native, len)  # type: ignore[arg-type]
    assert sys.getrefcount(native) == held + 1
    del call
    assert sys.getrefcount(native) == held


@pytest.mark.usefixtures("capture_part")
def test_here_asks_once_about_a_file_and_a_line() -> None:
    judged: list[str] = []
    entered: list[int] = []

    def judge(name: str) -> int:
        judged.append(name)
        return int(name != __file__)

    def enter(frame: types.FrameType, through: int, inner: types.CodeType | None) -> int:
        assert (through, inner) == (0, None)
        entered.append(frame.f_lineno)
        return len(entered)

    here = Here(judge, enter)

    def operation() -> int:
        return here()

    assert [operation() for _ in range(3)] == [1, 1, 1]
    assert operation() == 2
    assert len(set(entered)) == len(entered) == 2
    assert judged == [__file__]


@pytest.mark.usefixtures("capture_part")
def test_here_knows_no_line_among_strangers_and_passes_errors_on() -> None:
    def enter(_: types.FrameType, through: int, inner: types.CodeType | None) -> int:
        raise ValueError("no room")

    strangers, failing = Here(lambda _: 1, enter), Here(lambda _: 0, enter)

    def operation(here: Here) -> int:
        return here()

    assert operation(strangers) == 0
    with pytest.raises(ValueError, match="no room"):
        operation(failing)


def nested(*names: str) -> Callable[[Callable[[], int]], int]:
    """A function that calls its argument through one function in each of these files, the first being the outermost."""

    def call(asks: Callable[[], int]) -> int:
        return asks()

    for name in reversed(names):
        scope: dict[str, Any] = {"inner": call}
        exec(compile("def outer(asks):\n    return inner(asks)\n", name, "exec"), scope)
        call = scope["outer"]
    return call


OWNERS = {"user.py": 0, "torch.py": 1, "light.py": 2, "speed.py": 3}


@pytest.mark.usefixtures("capture_part")
@pytest.mark.parametrize(
    ("files", "found"),
    [
        (("user.py", "torch.py"), ("user.py", 0, "")),
        (("user.py", "light.py", "torch.py"), ("user.py", 2, "light.py")),
        (("user.py", "light.py", "torch.py", "speed.py", "torch.py"), ("user.py", 2, "speed.py")),
        (("user.py", "light.py", "user.py", "torch.py"), ("user.py", 0, "")),
        (("light.py", "torch.py", "speed.py", "torch.py"), ("speed.py", 0, "")),
        (("torch.py",), None),
        (("user.py", *["light.py"] * 70), ("user.py", 2, "light.py")),
    ],
)
def test_here_finds_the_users_line_behind_libraries(
    files: tuple[str, ...], found: tuple[str, int, str] | None
) -> None:
    entered: list[tuple[str, int, str]] = []

    def enter(frame: types.FrameType, through: int, inner: types.CodeType | None) -> int:
        entered.append((frame.f_code.co_filename, through, inner.co_filename if inner else ""))
        return 40 + len(entered)

    here = Here(lambda name: OWNERS.get(name, 1), enter)
    call = nested(*files)
    for _ in range(3):
        assert call(lambda: here()) == (41 if found else 0)
    assert entered == ([found] if found else [])


@pytest.mark.usefixtures("capture_part")
def test_here_tells_a_line_apart_by_the_libraries_and_functions_it_calls() -> None:
    entered: list[tuple[int, types.CodeType]] = []

    def enter(_: types.FrameType, through: int, inner: types.CodeType | None) -> int:
        assert inner is not None
        entered.append((through, inner))
        return len(entered)

    here = Here(lambda name: OWNERS.get(name, 1), enter)
    calls = [nested("light.py"), nested("speed.py"), nested("light.py", "speed.py")]
    scope: dict[str, Any] = {}
    exec(compile("def user(call, asks):\n    return call(asks)\n", "user.py", "exec"), scope)
    found = [scope["user"](call, lambda: here()) for call in (*calls, calls[0])]
    assert found == [1, 2, 3, 1]
    assert [(through, inner.co_filename) for through, inner in entered] == [
        (2, "light.py"),
        (3, "speed.py"),
        (2, "speed.py"),
    ]


@pytest.mark.usefixtures("capture_part")
def test_only_collections_of_the_oldest_generation_are_passed_on() -> None:
    seen: list[Any] = []
    callback = Oldest(lambda when, info: seen.append((when, info["generation"])))
    for generation in (0, 1, 2, 0):
        callback("start", {"generation": generation})
    assert seen == [("start", 2)]


class Group:
    def size(self) -> str:
        return "torch's"


class OurGroup(Group):
    pass


@pytest.mark.usefixtures("capture_part")
def test_hidden_binds_to_its_owner_only_and_switches_the_compiler_off() -> None:
    states: list[Any] = ["callback"]

    def ours(group: Group, *args: int, **kwargs: int) -> Any:
        """Ours."""
        if args:
            raise ValueError("as without us")
        return states[-1], kwargs

    hidden = Hidden(ours, lambda: states[-1], states.append, Group.__dict__["size"], Group)
    replaced: Any = type("Replaced", (), {"size": Hidden(ours, None, None)})
    assert replaced().size(a=1) == ("callback", {"a": 1})
    original, Group.size = Group.size, hidden  # type: ignore[assignment,method-assign]
    try:
        assert Group().size(a=1) == (None, {"a": 1})  # type: ignore[call-arg,comparison-overlap]
        assert states == ["callback", None, "callback"]
        with pytest.raises(ValueError, match="as without us"):
            Group().size(3)  # type: ignore[call-arg]
        assert states[-1] == "callback"
        assert OurGroup().size() == "torch's"
        assert Group.size is original
        assert Group().size.__name__ == "ours"
    finally:
        Group.size = original  # type: ignore[method-assign]


@pytest.mark.usefixtures("capture_part")
def test_hidden_leaves_a_callable_that_does_not_bind_as_it_is() -> None:
    original = functools.partial(int, "7")
    hidden = Hidden(lambda group: 0, lambda: "callback", None, original, Group)
    replaced: Any = type("Replaced", (OurGroup,), {"size": hidden})
    if not hasattr(original, "__get__"):
        assert replaced.size is original
        assert replaced().size() == 7
    assert hidden("group") == 0  # nothing to hide from without a way to switch the compiler off
