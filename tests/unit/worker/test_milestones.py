"""What a standby is told to import: what is installed, nothing of the script's own."""

import importlib
import importlib.machinery
import os
import socket
import threading
import types
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook

from keepstep.worker import group_setup as _group_setup
from keepstep.worker import milestones as _milestones
from keepstep.worker.group_setup import wait_for_listener


def module(name: str, origin: str | None, spec_name: str | None = None) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(spec_name or name, None, origin=origin)
    return made


def test_modules_of_the_script_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cwd, scripts = tmp_path / "cwd", tmp_path / "scripts"
    cwd.mkdir()
    scripts.mkdir()
    monkeypatch.chdir(cwd)
    main = types.ModuleType("__main__")
    main.__file__ = str(scripts / "train.py")
    modules = {
        "__main__": main,
        "installed": module("installed", "/usr/lib/python3/dist-packages/installed.py"),
        "in_a_venv_here": module("in_a_venv_here", f"{cwd}/.venv/lib/site-packages/in_a_venv_here.py"),
        "on_the_path": module("on_the_path", "/opt/megatron/on_the_path.py"),
        "beside": module("beside", f"{scripts}/beside.py"),
        "under_cwd": module("under_cwd", f"{cwd}/package/under_cwd.py"),
        "built_in": module("built_in", "built-in"),
        "namespace": module("namespace", None),
        "alias": module("alias", "/opt/a.py", "another.name"),
        "nothing": None,
        "made_up": types.ModuleType("made_up"),
    }
    assert _milestones.installed_modules(modules) == ["installed", "in_a_venv_here", "on_the_path"]


def test_a_step_that_torch_makes_to_have_an_optimizers_state_is_none_of_the_training() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    made_up: list[bool] = []
    hook = register_optimizer_step_post_hook(lambda *_: made_up.append(_milestones.is_made_up()))
    try:
        get_optimizer_state_dict(model, optimizer)
        optimizer.step()
    finally:
        hook.remove()
    assert made_up == [True, False]


def test_a_milestone_is_told_once_and_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_milestones, "_reached", set())
    monkeypatch.setenv(_milestones.PIPE, str(tmp_path / "absent"))
    _milestones.reached("state")
    reader, writer = os.pipe()
    try:
        monkeypatch.setenv(_milestones.PIPE, f"/proc/self/fd/{writer}")
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("KEEPSTEP_INCARNATION", "2")
        for name in ("state", "groups", "groups"):
            _milestones.reached(name)
        (line,) = os.read(reader, 4096).decode().splitlines()
    finally:
        os.close(reader)
        os.close(writer)
    assert line.split()[:3] == ["groups", "3", "2"]


def test_this_torch_makes_its_store_where_we_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.distributed.rendezvous")
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(module, "_create_c10d_store", lambda *args, **_: calls.append(args))
    monkeypatch.setattr(_group_setup, "wait_for_listener", lambda port: calls.append((port,)))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    _group_setup.install()
    for rank in (0, 1):
        module._create_c10d_store("localhost", 29, rank, 2, None, use_libuv=True)
    assert calls == [("localhost", 29, 0, 2, None), (29,), ("localhost", 29, 1, 2, None)]


def _does_not_tell(_: int) -> bool:
    raise OSError


def test_the_function_is_there() -> None:
    module = importlib.import_module("torch.distributed.rendezvous")
    assert callable(module._create_c10d_store)


@pytest.mark.parametrize("tells", [True, False])
def test_ranks_wait_for_the_store_that_comes_late(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    """Also where the kernel does not tell of listening sockets alone."""
    if not tells:
        monkeypatch.setattr(_group_setup, "_listens", _does_not_tell)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not wait_for_listener(port, 0.02)
        found: list[bool] = []
        waiting = threading.Thread(target=lambda: found.append(wait_for_listener(port, 60)))
        waiting.start()
        server.listen()
        waiting.join(60)
        assert found == [True]
