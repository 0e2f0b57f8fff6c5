"""The launcher's settings: what a site sets once in a file or the environment, not on every command line."""

from __future__ import annotations

from functools import partial

from keepstep.core.config import Setting
from keepstep.core.kernel_records import KERNEL_LOG

_setting = partial(Setting, "run")

SETTINGS = (
    _setting("runs_dir", "runs", "folder in which run folders are made"),
    _setting("watch", True, "watch the job (off: run it only; flag --no-watch)"),
    _setting("check", True, "check nodes before the start and after failures (flag --no-check)"),
    _setting("validate", True, "hold the job for seconds to test devices and links when in doubt"),
    _setting("mitigate", "auto", "auto: do what pays about a slowdown that lasts; advise: only say it; off"),
    _setting(
        "on_hang",
        "restart",
        "restart: end a process that hangs for sure, if restarts are left; report: only say who hangs",
    ),
    _setting(
        "on_corrupt",
        "report",
        "restore: all ranks go back to when a rank's state was right, if restarts are wanted; report: only say it",
    ),
    _setting(
        "hang_patience_s",
        0.0,
        "how long a process that hangs is left alone; 0: by the timeouts and pauses of its rank, 10 minutes or so",
    ),
    _setting("stopped_patience_s", 60.0, "how long a stopped process is left alone"),
    _setting(
        "keep_words",
        "stderr",
        "stderr: what workers write to stderr is kept, too; all: and to stdout; off",
    ),
    _setting("kernel_log", KERNEL_LOG, "the kernel's log, or a file or FIFO of lines in its form"),
    _setting("end_unix_s", 0.0, "when the scheduler ends the job, in Unix seconds; 0: as Slurm says"),
    _setting("termination_log", "/dev/termination-log", "file that Kubernetes reads a last message from"),
    _setting(
        "dataset_paths",
        "",
        "folders or files of data sets, with commas between, that have to be readable on every node",
    ),
    _setting("node_name", "", "name of this node in verdicts; empty: the host name"),
    _setting("secret_file", "", "file (0600) with the secret that the processes of a run share"),
    _setting("tls_cert", "", "certificate (PEM) of this node; with tls_key and tls_ca: mutual TLS"),
    _setting("tls_key", "", "private key (PEM) of this node"),
    _setting("tls_ca", "", "certificate authority (PEM) that signed the nodes' certificates"),
    _setting("controller_listen", "", "HOST:PORT the controller listens on; empty: the endpoint"),
    _setting("layout", "", "parallel layout, e.g. tp2-dp4-pp2, first varies fastest; empty: inferred"),
    _setting("ring_records", 65536, "records of 64 bytes in each worker's ring"),
    _setting("checkpoint_bytes", 0, "most memory of a node for checkpoints; 0: half of what it has"),
    _setting("checkpoint_dir", "", "folder or URL where checkpoints are kept beyond the run; empty: nowhere"),
    _setting(
        "checkpoint_every", "auto", "steps from one to the next there; auto: by the cost model; 0: on demand"
    ),
    _setting("checkpoint_keep", 0, "newest steps that stay there; 0: all"),
    _setting("checkpoint_wait_s", 600.0, "how long the end of a run waits for steps on their way there"),
    _setting("failures_per_day", 1.0, "of the whole job, for the cost model"),
    _setting("checkpoint_backups", 1, "nodes that back up each rank's checkpoints in memory; 0: none"),
    _setting("checkpoint_backup_rate", 0.0, "bytes a second that a node sends for backups; 0: no limit"),
    _setting("failure_domain", "", "label, e.g. of the rack; backups go to nodes of another one"),
    _setting("standbys", "auto", "warm standby processes; auto: as many as workers, if restarts are wanted"),
    _setting(
        "standby_idle_s", 20.0, "for so long a standby warms on CPU time that others leave, then as they do"
    ),
    _setting(
        "restart_budget",
        "rank=5,node=10,hour=30,same=2",
        "most restarts within an hour for one rank, one node and all; failures at one step with one error",
    ),
    _setting(
        "shrink_after_s",
        30.0,
        "how long a node is waited for before a job of MIN:MAX nodes goes on with fewer",
    ),
    _setting("elect", True, "another node hosts the controller when its own is lost"),
    _setting("in_place", False, "at a restart a training that can goes on in its process"),
    _setting(
        "node_remedy", "advise", "of keepstep slurm, about bad nodes: off; advise: say it; auto: drain them"
    ),
    _setting(
        "drain_command", "", "what drains a node instead of scontrol; {node}, {reason} are put in, no shell"
    ),
    _setting("join_timeout_s", 600.0, "how long to wait for the other nodes at the start"),
    _setting("leave_s", 3.0, "with in_place: how long a training may take to be left"),
    _setting("linger_s", 10.0, "how long agent and controller may take after the workers ended"),
)
