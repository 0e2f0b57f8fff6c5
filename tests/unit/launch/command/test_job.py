import signal
from pathlib import Path

import pytest

from keepstep.core.errors import UsageError
from keepstep.launch.command.job import gpu_count, job_from_command_line, stream_masks, worker_count
from keepstep.launch.command.meeting import Endpoint, node_range, parse_endpoint
from keepstep.launch.command.persisting import Persisting

BARE = {"HOME": "/nowhere"}


def job(*words: str, **environ: str):
    return job_from_command_line([*words, "train.py", "--lr", "1"], {**BARE, **environ})


def test_one_node_by_default() -> None:
    plain = job("--nproc-per-node", "2")
    assert plain.rendezvous.endpoint is None
    assert (plain.master_addr, plain.master_port) == ("127.0.0.1", 0)
    assert (plain.script, plain.arguments, plain.nproc) == ("train.py", ("--lr", "1"), 2)
    assert len(plain.run_id) == 36  # as torchrun: a fresh id
    assert plain.shutdown_timeout_s == 30
    assert plain.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def test_tls_files_are_found_from_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``link/..`` is the folder around the target of a link, not the one around the link."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.pem").touch()
    (tmp_path / "link").symlink_to("a/b")
    monkeypatch.chdir(tmp_path)
    tls = job(*(word for name in ("cert", "key", "ca") for word in (f"--tls-{name}", "link/../x.pem"))).tls
    monkeypatch.chdir("/")
    assert tls is not None
    assert all(Path(file).is_file() for file in (tls.cert, tls.key, tls.ca))


def test_a_port_given_for_one_node_is_kept_with_the_id() -> None:
    static = job("--master-port", "1234", "--rdzv-id", "j1")
    assert (static.master_port, static.run_id) == (1234, "j1")


def test_several_nodes_meet_where_torchrun_would() -> None:
    c10d = job("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0")
    assert c10d.rendezvous.endpoint == Endpoint("node0", 29400)
    assert c10d.rendezvous.node_rank == -1
    static = job("--nnodes", "2", "--node-rank", "1", "--master-addr", "node0")
    assert static.rendezvous.endpoint == Endpoint("node0", 29500)
    assert static.rendezvous.node_rank == 1
    v6 = job("--nnodes", "2", "--master-addr", "[::1]", "--master-port", "7")
    assert v6.rendezvous.endpoint == Endpoint("::1", 7)
    assert str(v6.rendezvous.endpoint) == "[::1]:7"


def test_a_node_rank_that_the_rendezvous_does_not_ask_for_is_told() -> None:
    meet = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0")
    said = (
        "--node-rank 1 has no effect with --rdzv-backend c10d, where the rendezvous numbers the nodes; "
        "--rdzv-backend static keeps it"
    )
    assert job("--node-rank", "1", *meet).warnings == (said,)
    assert job("--node_rank=1", *meet, PET_NODE_RANK="0").warnings == (said,)
    assert len(job("--node-rank", "0", *meet).warnings) == 1
    assert job(*meet).warnings == ()
    assert job(*meet, PET_NODE_RANK="1").warnings == (), "set by what starts the nodes"
    assert job("--node-rank", "1", "--nnodes", "2", "--master-addr", "node0").warnings == ()
    assert job("--node-rank", "0", "--rdzv-backend", "c10d").warnings == (), "the only node"


def test_as_many_standbys_as_workers_when_restarts_are_wanted() -> None:
    assert job("--nproc-per-node", "4").standbys == 0
    assert job("--nproc-per-node", "4", "--standbys", "4").standbys == 0
    restarts = ("--nproc-per-node", "4", "--max-restarts", "2")
    assert job(*restarts).standbys == 4
    assert job(*restarts, "--no-python").standbys == 0
    for given, standbys in (("0", 0), ("2", 2), ("9", 4), ("auto", 4)):
        assert job(*restarts, "--standbys", given).standbys == standbys
        assert job(*restarts, KEEPSTEP_STANDBYS=given).standbys == standbys
    for wrong in ("-1", "many", "1.5", ""):
        with pytest.raises(UsageError, match="--standbys"):
            job(*restarts, f"--standbys={wrong}")


@pytest.mark.parametrize(
    ("flags", "ended"),
    [
        ((), False),
        (("--max-restarts", "3"), True),
        (("--on-hang", "report", "--max-restarts", "3"), False),
        (("--on-hang", "restart"), False),
        (("--on-hang", "restart", "--max-restarts", "3"), True),
    ],
)
def test_a_hang_is_ended_only_where_the_job_may_begin_again(flags: tuple[str, ...], ended: bool) -> None:
    assert job(*flags, "train.py").restart_hangs is ended


def test_ranks_go_back_only_on_demand_and_where_the_job_may_begin_again() -> None:
    assert not job("--max-restarts", "3", "train.py").restore_corrupt
    assert not job("--on-corrupt", "restore", "train.py").restore_corrupt
    assert job("--on-corrupt", "restore", "--max-restarts", "3", "train.py").restore_corrupt
    with pytest.raises(UsageError, match="--on-corrupt"):
        job("--on-corrupt", "mend", "train.py")


def test_the_controller_moves_only_where_that_is_wanted_and_the_job_can_go_on() -> None:
    several = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "node0")
    assert job(*several, "--max-restarts", "2").elects
    assert job(*several, "--max-restarts", "2", "--elect").elects
    assert not job(*several, "--max-restarts", "2", "--no-elect").elects
    assert not job(*several, "--max-restarts", "2", KEEPSTEP_ELECT="false").elects
    assert not job(*several, "--elect").elects
    assert not job("--max-restarts", "2", "--elect").elects


def test_where_checkpoints_go_and_how_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert job().persisting is None
    assert job("--checkpoint-dir", "a/b").persisting == Persisting(str(tmp_path / "a/b"), None, 0, 600.0, 1.0)
    given = job(
        "--checkpoint-dir", f"file://{tmp_path}", "--checkpoint-every", "50", "--checkpoint-keep", "3"
    )
    assert given.persisting == Persisting(str(tmp_path), 50, 3, 600.0, 1.0)
    assert job("--checkpoint-dir", "memory://run", KEEPSTEP_FAILURES_PER_DAY="4").persisting == Persisting(
        "memory://run", None, 0, 600.0, 4.0
    )


def test_the_join_timeout_comes_from_the_rendezvous_configuration() -> None:
    assert job("--rdzv-conf", "join_timeout=7,is_host=0").rendezvous.join_timeout_s == 7
    assert job("--rdzv-conf", "is_host=0").rendezvous.is_host is False
    assert job(KEEPSTEP_JOIN_TIMEOUT_S="9").rendezvous.join_timeout_s == 9


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nnodes", "0"], "--nnodes 0"),
        (["--nnodes", "3:2"], "MIN <= MAX"),
        (["--checkpoint-dir", "ckpt", "--no-watch"], "leave one of them out"),
        (["--checkpoint-dir", "ckpt", "--checkpoint-every", "often"], "a number of steps, auto, or 0"),
        (["--checkpoint-dir", "ckpt", "--checkpoint-keep", "-1"], "0 to keep all"),
        (["--checkpoint-dir", "/etc/passwd/ckpt"], "/etc/passwd is no folder that can be written to"),
        (["--checkpoint-dir", "nowhere://bucket"], "nowhere://bucket"),
        (["--nproc-per-node", "0"], "at least 1"),
        (["--nproc-per-node", "tpu"], "auto, cpu or gpu"),
        (["--nnodes", "2", "--rdzv-backend", "c10d"], "--rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:0"], "give a port"),
        (["--nnodes", "2", "--rdzv-endpoint", "h"], "HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "2"], "give 0 to 1"),
        (["--rdzv-backend", "etcd"], "--rdzv-backend c10d"),
        (["--standalone", "--nnodes", "2"], "one node only"),
        (["-m", "--no-python"], "exclude each other"),
        (["--redirects", "4"], "LOCAL_RANK:N"),
        (["--local-ranks-filter", "a"], "as 0,1,2"),
        (["--signals-to-handle", "SIGKILL"], "SIGKILL"),
        (["--shutdown-timeout", "-1"], "0 or more"),
        (["--max-restarts", "-1"], "0 or more"),
        (["--rdzv-conf", "x"], "key=value"),
        (["--tls-cert", "/nowhere.pem"], "--tls-cert"),
        (["--log-dir", __file__], "give a folder"),
    ],
)
def test_what_cannot_be_used_says_what_to_do(words: list[str], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        job(*words)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_shutdown_timeout_from_the_environment_as_torchrun() -> None:
    assert job(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5").shutdown_timeout_s == 5
    assert job("--shutdown-timeout", "3", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5").shutdown_timeout_s == 3


def test_settings_flag_beats_environment(tmp_path: Path) -> None:
    assert job(KEEPSTEP_WATCH="0").watch is False
    assert job("--no-watch", KEEPSTEP_WATCH="1").watch is False
    assert job(KEEPSTEP_NODE_NAME="gpu-7").node == "gpu-7"


def test_names_fit_a_folder() -> None:
    assert job("--name", "a b/../c").name == "a-b-..-c"
    assert job().name == "train"
    assert job_from_command_line(["-m", "pkg.train"], BARE).name == "pkg.train"


def test_small_parsers() -> None:
    assert node_range("2:4") == (2, 4)
    assert parse_endpoint("--x", "[::1]:5", None) == Endpoint("::1", 5)
    assert stream_masks("-r", "0:1,1:3,9:3", 3) == (1, 3, 0)
    for text in ("a:b", "::1", "", "h:99999"):
        with pytest.raises(UsageError):
            parse_endpoint("--x", text, 1)


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpu_count({}, tmp_path) == 3
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "2,0"}, tmp_path) == 2
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "0,7,1"}, tmp_path) == 1  # CUDA stops at the first bad one
    assert gpu_count({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "GPU-ab,MIG-cd"}, tmp_path) == 2
    assert worker_count("auto", {}, tmp_path) == 3
    with pytest.raises(UsageError, match="no NVIDIA device"):
        worker_count("gpu", {}, tmp_path / "empty")
