"""Makes the pictures of docs/howto/see.md: real jobs on this machine, their pages in Chromium. Minutes; one needs root.

python tools/page_pictures.py [slow hang recovered exchange healthy ended] [--out docs/howto/pictures]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GPT = [str(ROOT / "examples/gpt/train.py"), "--dp", "2", "--pp", "2", "--emulate-compute-ms", "10"]
RECOVER = str(ROOT / "examples/recover/train.py")
_PATIENCE_S = 150.0


@contextlib.contextmanager
def job(run: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job of four ranks, ended with the block."""
    command = [sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", "4", "--run-dir", str(run)]
    started = subprocess.Popen([*command, *words], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(30)
        if started.poll() is None:
            started.kill()


@contextlib.contextmanager
def page_of(run: Path, port: int = 8643) -> Iterator[str]:
    """The address of the run's page."""
    command = [sys.executable, "-m", "keepstep.cli", "serve", run.name, "--listen", f"127.0.0.1:{port}"]
    serving = subprocess.Popen(
        command, cwd=run.parents[1]
    )  # by name: no path of this machine is in the picture
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        serving.terminate()
        serving.wait()


def until(happens: Callable[[], Any]) -> Any:
    """Wait for it."""
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        if found := happens():
            return found
        time.sleep(0.3)
    raise SystemExit("it did not happen")


def incident(run: Path, kind: str, **has: Any) -> bool:
    """Whether the run has an incident of this kind with these fields set."""
    for path in (run / "incidents").glob("[0-9]*.json"):
        told = json.loads(path.read_bytes())
        if told["kind"] == kind and all(bool(told.get(name)) == value for name, value in has.items()):
            return True
    return False


def newest_step(run: Path) -> int:
    """The newest step that the run's status tells."""
    try:
        return int(json.loads((run / "status.json").read_bytes())["newest_step"])
    except (OSError, ValueError, KeyError):
        return -1


def worker_of(launcher: int, rank: int) -> int:
    """The process that plays a rank."""
    import psutil

    for one in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if one.environ().get("RANK") == str(rank) and RECOVER in one.cmdline():
                return one.pid
    raise SystemExit(f"nobody plays rank {rank}")


def shoot(url: str, out: Path, *, scheme: str = "light", width: int = 1280) -> None:
    """One picture of the whole page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as begun:
        browser = begun.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        for _ in range(100):
            with contextlib.suppress(Exception):  # the server is not there yet
                page.goto(url)
                break
            time.sleep(0.2)
        until(lambda: page.evaluate("Boolean(window.keepstep?.state.words)"))
        page.wait_for_timeout(4000)
        content = page.screenshot(full_page=True)
        browser.close()
    out.parent.mkdir(parents=True, exist_ok=True)
    save(content, out)


def save(content: bytes, out: Path) -> None:
    """As WebP where Pillow is there, else as PNG."""
    try:
        import io

        from PIL import Image
    except ImportError:
        out.with_suffix(".png").write_bytes(content)
        return
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    picture = picture.resize((1000, picture.height * 1000 // picture.width), Image.Resampling.LANCZOS)
    picture.save(out.with_suffix(".webp"), "WEBP", quality=70, method=6)


def slow(run: Path, out: Path) -> None:
    with (
        job(run, *GPT, "--steps", "900", "--fault", "slow rank 2 by 2x at step 20"),
        page_of_later(run) as url,
    ):
        until(lambda: incident(run, "slow"))
        until(lambda: newest_step(run) > 34)
        shoot(url(), out)


def hang(run: Path, out: Path) -> None:
    with (
        job(run, *GPT, "--steps", "900", "--fault", "hang rank 1 at step 12 in backward"),
        page_of_later(run) as url,
    ):
        until(lambda: incident(run, "hang"))
        shoot(url(), out)


def recovered(run: Path, out: Path) -> None:
    losses = run.parents[1] / "losses"
    losses.mkdir()
    words = ["--max-restarts", "3", RECOVER, "100000", str(losses)]
    with job(run, *words) as running, page_of_later(run) as url:
        until(lambda: newest_step(run) > 50)
        os.kill(worker_of(running.pid, rank=2), signal.SIGKILL)
        until(lambda: incident(run, "crash", recovery=True))
        time.sleep(5)
        shoot(url(), out)


def healthy(run: Path, out: Path) -> None:
    with job(run, *GPT, "--steps", "900"), page_of_later(run) as url:
        until(lambda: newest_step(run) > 40)
        shoot(url(), out)


def ended(run: Path, out: Path) -> None:
    fault = "slow rank 3 by 2x at step 15 for 15 steps"
    with job(run, *GPT, "--steps", "45", "--fault", fault) as running:
        running.wait(_PATIENCE_S)
    with page_of_later(run) as url:
        shoot(url(), out, scheme="dark")


def exchange(run: Path, out: Path) -> None:
    """Four hosts as network namespaces: the page is written by one of them, which reaches the controller."""
    sys.path.insert(0, str(ROOT))
    from tests.e2e import testbed as beds

    from keepstep.faults import SlowLink

    if reason := beds.missing():
        raise SystemExit(reason)
    keepstep = [sys.executable, "-m", "keepstep.cli"]
    with beds.four_hosts((0, 0, 0, 0)) as bed:
        hosts = list(bed.hosts.values())
        for number, host in enumerate(hosts):
            words = [
                "--nnodes",
                "4",
                "--node-rank",
                str(number),
                "--master-addr",
                "node-a",
                "--master-port",
                "29555",
            ]
            words += ["--nproc-per-node", "1", "--max-restarts", "1", "--standbys", "0", "--no-validate"]
            script = [str(ROOT / "tests/e2e/exchange_train.py"), str(run.parents[1]), "100000"]
            host.start([*keepstep, "run", "--run-dir", str(run), *words, *script], {"OMP_NUM_THREADS": "1"})
        losses = run.parents[1] / "losses-0"
        until(lambda: losses.exists() and losses.read_text().count("\n") > 100)
        with bed.links.inject(SlowLink("node-a", "node-c", "20mbit")):
            until(lambda: json.loads((run / "status.json").read_bytes()).get("incarnation") == 1)
            begun = losses.read_text().count("\n")
            until(lambda: losses.read_text().count("\n") > begun + 40)
            page = run.parents[1] / "page.html"
            writing = hosts[0].start(
                [
                    "sh",
                    "-c",
                    'cd "$0" && exec "$@"',
                    str(run.parents[1]),
                    *keepstep,
                    "report",
                    run.name,
                    "--html",
                    str(page),
                ],
                {},
            )
            print(*writing.communicate(timeout=60))
        (run.parents[1] / "enough").touch()
        shoot(page.as_uri(), out)


@contextlib.contextmanager
def page_of_later(run: Path) -> Iterator[Callable[[], str]]:
    """The page's server is started when its address is asked for."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(page_of(run))


PICTURES = {one.__name__: one for one in (slow, hang, recovered, exchange, healthy, ended)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(PICTURES), help=", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs/howto/pictures")
    parser.add_argument("--keep", type=Path, help="keep the runs' folders here")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # jobs and servers are ended on the way out
    for name in given.names:
        top = given.keep / name if given.keep else Path(tempfile.mkdtemp(prefix="keepstep-picture-"))
        (top / "runs").mkdir(parents=True, exist_ok=True)
        PICTURES[name](top / "runs" / name, given.out.resolve() / f"{name}.webp")
        print(f"{name}: {top}")


if __name__ == "__main__":
    main()
