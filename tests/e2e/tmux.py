"""A terminal of a chosen size, in tmux: what a program shows there, keys, other sizes."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PATIENCE_S = 60.0


class Terminal:
    """One window of a tmux server of its own. The command's exit code is shown as ``rc=N`` once it has ended."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        width: int,
        height: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._socket = str(folder / "tmux")
        # `cat` shows what is typed afterwards only if the terminal echoes again.
        script = f"trap : INT; {shlex.join(words)}; echo rc=$?; exec cat"
        # tmux names the terminal itself, so that variables are set behind it.
        wanted = [f"{name}={value}" for name, value in {"LC_ALL": "C.UTF-8", **(env or {})}.items()]
        shell = shlex.join(["exec", "env", *wanted, "sh", "-c", script])
        size = ["-x", str(width), "-y", str(height)]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, shell)

    def text(self, *, with_colours: bool = False) -> str:
        """What is on the screen now."""
        return self._tmux("capture-pane", "-p", *(["-e"] if with_colours else []))

    def lines(self) -> list[str]:
        """The lines of the screen."""
        return self.text().splitlines()

    def wait_for(self, is_there: str | Callable[[str], bool]) -> str:
        """The screen, once a text stands on it or the condition holds. Raises AssertionError where that never is."""
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            shown = self.text()
            if is_there in shown if isinstance(is_there, str) else is_there(shown):
                return shown
            time.sleep(0.05)
        raise AssertionError(f"{is_there} is not on the screen:\n{self.text()}")

    def keys(self, *names: str) -> None:
        """Press keys, by tmux's names for them."""
        self._tmux("send-keys", *names)

    def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def pids(self) -> list[int]:
        """The processes whose parent is the window's shell."""
        shell = self._tmux("display-message", "-p", "#{pane_pid}").strip()
        path = Path(f"/proc/{shell}/task/{shell}/children")
        return [int(word) for word in path.read_text().split()]

    def close(self) -> None:
        """End the server and all in it."""
        self._tmux("kill-server")

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-S", self._socket, *words],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout
