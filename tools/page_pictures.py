"""Makes the pictures of docs/howto/see.md: real jobs on this machine, their pages in Chromium.

    python tools/page_pictures.py [slow hang recovered exchange healthy ended] [--out docs/howto/pictures]

All train with torch on Gloo, with emulated computing, and are broken on purpose. Six minutes; `exchange` needs root, as
its four hosts are network namespaces. The machine should have nothing else to do: what else runs is in the pictures.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
KEEPSTEP = [sys.executable, "-m", "keepstep.cli"]
GPT = [str(ROOT / "examples/gpt/train.py"), "--dp", "2", "--pp", "2", "--emulate-compute-ms", "10"]
RECOVERING = str(ROOT / "tests/e2e/in_place_train.py")
EXCHANGING = str(ROOT / "tests/e2e/exchange_train.py")
PORT = 8643
WIDTH, SHOWN_WIDTH = 1280, 1000  # of the page, of its picture
_PATIENCE_S = 300.0
_IDLE = ("chrt", "--idle", "0")
_SETTLED = """Boolean(window.keepstep?.state.words && keepstep.heat?.tile()) &&
  keepstep.pictures.every((one) => one.drawn_ms !== undefined) &&
  Boolean(document.querySelector("#pipeline figure, #pipeline .none"))"""

Within = Callable[[Sequence[str]], list[str]]
"""A command as it has to be called from here to run on a host."""


def here(command: Sequence[str]) -> list[str]:
    """On this machine."""
    return list(command)


def until(happens: Callable[[], Any], what: str = "") -> Any:
    """Wait for it."""
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        if found := happens():
            return found
        time.sleep(0.2)
    raise SystemExit(f"this did not happen within {_PATIENCE_S:.0f} s: {what or 'see above'}")


class Run:
    """A run's folder, under ``runs`` of a folder where its job writes what it likes."""

    def __init__(self, top: Path, name: str) -> None:
        self.top, self.name = top, name
        self.folder = top / "runs" / name
        self.said = top / "said"  # by its launchers
        self.folder.parent.mkdir(parents=True)

    def incidents(self, kind: str) -> list[dict[str, Any]]:
        """Those of one kind, as they were written last."""
        found: list[dict[str, Any]] = []
        for path in sorted((self.folder / "incidents").glob("[0-9]*.json")):
            with contextlib.suppress(OSError, ValueError):  # it is being written
                found.append(json.loads(path.read_bytes()))
        return [one for one in found if one["kind"] == kind]

    @property
    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "status.json").read_bytes())
        except (OSError, ValueError):
            return {}

    @property
    def step(self) -> int:
        """The newest one."""
        return self.status.get("newest_step", -1)

    def until_step(self, step: int) -> None:
        until(lambda: self.step >= step, f"step {step} of {self.name}")

    def more(self, steps: int) -> None:
        self.until_step(self.step + steps)

    def until_warm(self, launchers: int = 1) -> None:
        """Wait until standbys are warm on all nodes."""
        texts = [self.said.with_name(f"said-{number}") for number in range(launchers)]
        until(
            lambda: all(one.exists() and "standbys are warm" in one.read_text() for one in texts),
            "warm standbys",
        )

    def command(self, *words: str, launcher: int = 0) -> list[str]:
        """A launcher of the job."""
        said = ["sh", "-c", 'exec "$@" 2>"$0"', str(self.said.with_name(f"said-{launcher}"))]
        return [*said, *KEEPSTEP, "run", "-v", "--run-dir", str(self.folder), *words]


@contextlib.contextmanager
def job(run: Run, *words: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job of four ranks on this machine, ended with the block."""
    started = subprocess.Popen(
        run.command("--nproc-per-node", "4", *words), env={**os.environ, "OMP_NUM_THREADS": "1", **environ}
    )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(30)
        if started.poll() is None:
            started.kill()


class Look:
    """A browser that is there before it is needed: its start takes a core for seconds, which the job would show.

    Server and browser get the CPU time that nobody else wants.
    """

    def __init__(self, run: Run, out: Path, browser: Any, within: Within) -> None:
        self._run, self._out, self._browser, self._within = run, out, browser, within
        self._serving: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Start the page's server. The run is named: no path is in the picture."""
        words = [*KEEPSTEP, "serve", self._run.name, "--listen", f"127.0.0.1:{PORT}"]
        command = ["sh", "-c", 'cd "$0" && exec "$@"', str(self._run.top), *_IDLE, *words]
        self._serving = subprocess.Popen(self._within(command), stdout=subprocess.DEVNULL)

    def shoot(self, scheme: Literal["light", "dark"] = "light") -> None:
        """One picture of the whole page."""
        if self._serving is None:
            self.serve()
        page = self._browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(1e3 * _PATIENCE_S)
        until(lambda: _reached(page), "the server's answer")
        until(lambda: page.evaluate(_SETTLED), "a page that is drawn")
        page.wait_for_timeout(2500)  # what the nodes have written meanwhile is read in a few looks
        save(page.screenshot(full_page=True), self._out)
        page.close()

    def close(self) -> None:
        if self._serving is not None:
            self._serving.terminate()
            self._serving.wait()


def _reached(page: Any) -> bool:
    from playwright.sync_api import Error

    try:
        page.goto(f"http://127.0.0.1:{PORT}/")
    except Error:  # nobody listens there yet
        return False
    return True


@contextlib.contextmanager
def look(run: Run, out: Path, within: Within = here) -> Iterator[Look]:
    """Somebody who will look at the run from one host."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    wrapper = run.top / "chromium"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(within([*_IDLE, chromium]))} "$@"\n')
    wrapper.chmod(0o755)
    with sync_playwright() as begun:
        browser = begun.chromium.launch(executable_path=str(wrapper), args=["--no-sandbox"])
        looking = Look(run, out, browser, within)
        try:
            yield looking
        finally:
            looking.close()
            browser.close()


def save(content: bytes, out: Path) -> None:
    """A screenshot, small enough for a page of the docs."""
    from PIL import Image

    picture = Image.open(io.BytesIO(content)).convert("RGB")
    size = (SHOWN_WIDTH, picture.height * SHOWN_WIDTH // picture.width)
    out.parent.mkdir(parents=True, exist_ok=True)
    picture.resize(size, Image.Resampling.LANCZOS).save(out, "WEBP", quality=70, method=6)


def slow(run: Run, out: Path) -> None:
    with (
        look(run, out) as looking,
        job(run, *GPT, "--steps", "900", "--fault", "slow rank 2 by 2x at step 30"),
    ):
        run.until_step(5)
        looking.serve()
        until(lambda: run.incidents("slow"), "a slow rank")
        run.until_step(60)
        looking.shoot()


def hang(run: Run, out: Path) -> None:
    with (
        look(run, out) as looking,
        job(run, *GPT, "--steps", "900", "--fault", "hang rank 1 at step 30 in backward"),
    ):
        run.until_step(5)
        looking.serve()
        until(lambda: run.incidents("hang"), "a hang")
        time.sleep(12)  # somebody comes to look
        looking.shoot()


def recovered(run: Run, out: Path) -> None:
    kept = ["--checkpoint-dir", str(run.top / "kept"), "--checkpoint-every", "10"]
    words = ["--max-restarts", "3", "--in-place", *kept, RECOVERING, str(run.top), "ddp", "100000", ""]
    with look(run, out) as looking, job(run, *words, STEP_S="0.25") as running:
        run.until_warm()
        looking.serve()
        run.more(30)
        os.kill(worker_of(running.pid, rank=2), signal.SIGKILL)
        until(lambda: [one for one in run.incidents("crash") if one["status"] == "relieved"], "a recovery")
        run.more(25)
        looking.shoot()


def worker_of(launcher: int, rank: int) -> int:
    """The process that plays a rank."""
    import psutil

    for one in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if one.environ().get("RANK") == str(rank) and RECOVERING in one.cmdline():
                return one.pid
    raise SystemExit(f"nobody plays rank {rank}")


def exchange(run: Run, out: Path) -> None:
    """Four hosts as network namespaces, browser and server on the first; the link of two replicas turns slow."""
    sys.path.insert(0, str(ROOT))
    from tests.e2e import testbed as beds

    from keepstep.faults import SlowLink

    if reason := beds.missing():
        raise SystemExit(reason)
    with beds.four_hosts((0, 0, 0, 0)) as bed:
        hosts = list(bed.hosts.values())
        with look(run, out, hosts[0].command) as looking:
            for number, host in enumerate(hosts):
                words = ["--nnodes", "4", "--node-rank", str(number), "--master-addr", "node-a"]
                words += ["--master-port", "29555", "--nproc-per-node", "1", "--max-restarts", "1"]
                # Without it backups fill the slow link: each state goes to the next node, and there are four only.
                words += ["--checkpoint-backup-rate", "500000"]
                script = [EXCHANGING, str(run.top), "100000", "0.25"]
                command = run.command(*words, "--standbys", "1", "--no-validate", *script, launcher=number)
                host.start(command, {"OMP_NUM_THREADS": "1"})
            run.until_warm(launchers=4)
            looking.serve()
            run.more(40)
            with bed.links.inject(SlowLink("node-a", "node-c", "20mbit")):
                until(lambda: run.status.get("incarnation") == 1, "an exchange")
                until(lambda: [one for one in run.incidents("slow") if one["status"] != "open"], "its end")
                run.more(15)
                looking.shoot()
            (run.top / "enough").touch()


def healthy(run: Run, out: Path) -> None:
    with look(run, out) as looking, job(run, *GPT, "--steps", "900"):
        run.until_step(5)
        looking.serve()
        run.until_step(60)
        looking.shoot()


def ended(run: Run, out: Path) -> None:
    fault = "slow rank 3 by 2x at step 25 for 20 steps"
    with job(run, *GPT, "--steps", "70", "--fault", fault) as running:
        running.wait(_PATIENCE_S)
    with look(run, out) as looking:
        looking.shoot("dark")


PICTURES = {one.__name__: one for one in (slow, hang, recovered, exchange, healthy, ended)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(PICTURES), help=", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs/howto/pictures")
    parser.add_argument("--keep", type=Path, help="keep the runs' folders here, which must be new")
    given = parser.parse_args()
    if unknown := set(given.names) - set(PICTURES):
        parser.error(f"no such picture: {', '.join(sorted(unknown))}; there are: {', '.join(PICTURES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # jobs and servers are ended on the way out
    with tempfile.TemporaryDirectory(prefix="keepstep-pictures-") as passing:
        for name in given.names:
            top = (given.keep or Path(passing)).resolve() / name
            PICTURES[name](Run(top, name), given.out.resolve() / f"{name}.webp")
            print(f"{name}.webp", flush=True)


if __name__ == "__main__":
    main()
