"""Which sentence tells why a worker died: tracebacks of real exceptions, last words as C++ and Python write them."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable

import pytest

from keepstep.core.lost_connection import tells_of_another
from keepstep.launch.workers.error_text import (
    last_traceback,
    of_last_words,
    of_message,
    of_stderr,
    of_traceback,
)

LOST = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:4711"
FULL = OSError(28, "No space left on device")


def trace_of(program: Callable[[], object]) -> str:
    try:
        program()
    except Exception as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("it raises nothing")


def while_handled(first: Exception, last: Exception) -> str:
    def program() -> None:
        try:
            raise first
        except Exception:
            raise last  # noqa: B904

    return trace_of(program)


def caused(first: Exception, last: Exception) -> str:
    def program() -> None:
        try:
            raise first
        except Exception as error:
            raise last from error

    return trace_of(program)


def test_the_first_error_of_a_chain_is_told_and_the_last_one_with_it() -> None:
    zip_file = RuntimeError("[enforce fail at inline_container.cc:664] unexpected pos 448 vs 342")
    told = of_traceback(while_handled(FULL, zip_file))
    assert told == f"OSError: [Errno 28] No space left on device; then RuntimeError: {zip_file}"
    refused = ConnectionRefusedError(111, "Connection refused")
    assert of_traceback(caused(refused, ValueError("no data"))).startswith(
        "ConnectionRefusedError: [Errno 111]"
    )


@pytest.mark.parametrize("chain", [while_handled, caused])
def test_a_lost_connection_that_follows_an_own_error_is_not_told(chain: Callable[..., str]) -> None:
    assert of_traceback(chain(FULL, RuntimeError(LOST))) == "OSError: [Errno 28] No space left on device"
    killed = RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed.")
    assert of_traceback(chain(killed, RuntimeError(LOST))) == f"RuntimeError: {killed}"


@pytest.mark.parametrize(
    "handled", [StopIteration(), KeyError("lr"), ModuleNotFoundError("No module named 'apex'")]
)
def test_a_lost_connection_while_a_script_goes_on_after_what_it_handles_is_an_echo(
    handled: Exception,
) -> None:
    assert of_traceback(while_handled(handled, RuntimeError(LOST))) == f"RuntimeError: {LOST}"


@pytest.mark.parametrize("chain", [while_handled, caused])
def test_an_error_that_wraps_a_lost_connection_is_an_echo(chain: Callable[..., str]) -> None:
    told = of_traceback(chain(RuntimeError(LOST), ValueError("the step has failed")))
    assert told == f"RuntimeError: {LOST}; then ValueError: the step has failed"
    assert tells_of_another(told)
    broken = of_traceback(chain(RuntimeError(LOST), RuntimeError("CUDA error: uncorrectable ECC error")))
    assert not tells_of_another(broken)


def test_where_all_tell_of_another_the_last_is_told() -> None:
    timed_out = RuntimeError("Operation timed out!")
    assert of_traceback(while_handled(timed_out, RuntimeError(LOST))) == f"RuntimeError: {LOST}"


def test_of_a_single_error_the_traceback_adds_nothing() -> None:
    assert of_traceback(trace_of(lambda: {}["x"])) == ""
    assert of_traceback("") == ""


def test_the_cause_that_a_later_line_tells_is_told_with_the_first() -> None:
    nccl = "NCCL error in: a.hpp:317, unhandled cuda error\nncclUnhandledCudaError: no.\nLast error:\nCuda failure 802"
    assert of_message(f"DistBackendError: {nccl}").endswith("unhandled cuda error; Cuda failure 802")
    passed = "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback:\nValueError: bad row"
    assert (
        of_message(passed)
        == "ValueError: Caught ValueError in DataLoader worker process 0.; ValueError: bad row"
    )
    assert of_message("ValueError: two\nlines") == "ValueError: two"
    assert of_message("\n") == ""


def test_in_a_stderr_the_last_traceback_counts_with_its_chain() -> None:
    handled = trace_of(lambda: int("x"))
    last = while_handled(FULL, RuntimeError(LOST))
    text = "".join(f"[rank1]: {line}\n" for line in f"{handled}a warning\n{last}".splitlines())
    assert of_stderr(f"{text}[W some.cpp:3] goodbye\n", 1) == "OSError: [Errno 28] No space left on device"
    assert of_stderr(f"{handled}goodbye\n", 1) == "ValueError: invalid literal for int() with base 10: 'x'"


def test_without_a_traceback_the_last_line_counts_but_not_of_one_that_was_killed() -> None:
    assert of_stderr("step 5\nbye: no data\n\n", 3) == "bye: no data"
    assert of_stderr("step 5\nfree(): invalid pointer\n", -signal.SIGABRT) == "free(): invalid pointer"
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
        assert of_stderr("step 5\nloss 3.2\n", -number) == ""
    assert of_stderr("", 1) == ""


TERMINATED = """terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [Rank 3] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call.
frame #0: c10::Error::Error() + 0x9c
"""
FATAL = """Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/home/a/job/model.py", line 12 in forward
  File "/home/a/job/train.py", line 40 in <module>
"""


def test_last_words_are_what_cpp_said_else_where_python_was() -> None:
    said = "c10::DistBackendError: [Rank 3] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable"
    assert of_last_words(TERMINATED).startswith(said)
    assert of_last_words(TERMINATED + FATAL.replace("Segmentation fault", "Aborted")).startswith(said)
    assert of_last_words(FATAL) == "Fatal Python error: Segmentation fault in forward (model.py:12)"
    assert of_last_words(FATAL[: FATAL.index("Current")]) == ""
    assert of_last_words("") == ""
    assert of_stderr(f"step 5\n{TERMINATED}", -signal.SIGABRT).startswith(said)
    assert of_stderr(f"step 5\n{FATAL}", -signal.SIGSEGV) == of_last_words(FATAL)


def test_a_program_that_cannot_be_read_has_no_header_but_an_error() -> None:
    said = "W1 a warning\n  File \"/x/train.py\", line 2\n    def f(x:\n         ^\nSyntaxError: '(' was never closed\n"
    trace = last_traceback(said)
    assert trace.startswith('  File "/x/train.py"')
    assert of_stderr(trace, 1) == "SyntaxError: '(' was never closed"
    assert last_traceback("SyntaxError: said somebody\n") == ""
