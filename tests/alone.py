"""Tests of what is one process's: it has another one to itself."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable
from typing import Any


def alone(main: Callable[[], Any]) -> None:
    """In a process of its own: it adopts orphans and reaps whatever is its child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(main())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
