"""The launcher's settings: what a site sets once in a file or the environment, not on every command line."""

from __future__ import annotations

from keepstep.core.config import Setting

SETTINGS = (
    Setting("run", "runs_dir", "runs", "folder in which run folders are made"),
    Setting("run", "watch", True, "watch the job (off: run it only; flag --no-watch)"),
    Setting("run", "check", True, "check nodes before the start and after failures (flag --no-check)"),
    Setting("run", "validate", True, "hold the job for seconds to test devices and links when in doubt"),
    Setting(
        "run", "mitigate", "auto", "auto: do what pays about a slowdown that lasts; advise: only say it; off"
    ),
    Setting(
        "run",
        "on_hang",
        "report",
        "report: only say who hangs; restart: also end a process that hangs for sure, if restarts are left",
    ),
    Setting("run", "node_name", "", "name of this node in verdicts; empty: the host name"),
    Setting("run", "secret_file", "", "file (0600) with the secret that the processes of a run share"),
    Setting("run", "tls_cert", "", "certificate (PEM) of this node; with tls_key and tls_ca: mutual TLS"),
    Setting("run", "tls_key", "", "private key (PEM) of this node"),
    Setting("run", "tls_ca", "", "certificate authority (PEM) that signed the nodes' certificates"),
    Setting("run", "controller_listen", "", "HOST:PORT the controller listens on; empty: the endpoint"),
    Setting("run", "layout", "", "parallel layout, e.g. tp2-dp4-pp2, first varies fastest; empty: inferred"),
    Setting("run", "ring_records", 65536, "records of 64 bytes in each worker's ring"),
    Setting("run", "checkpoint_bytes", 0, "most memory of a node for checkpoints; 0: half of what it has"),
    Setting(
        "run", "checkpoint_dir", "", "folder or URL where checkpoints are kept beyond the run; empty: nowhere"
    ),
    Setting(
        "run",
        "checkpoint_every",
        "auto",
        "steps from one to the next there; auto: by the cost model; 0: on demand",
    ),
    Setting("run", "checkpoint_keep", 0, "newest steps that stay there; 0: all"),
    Setting(
        "run", "checkpoint_wait_s", 600.0, "how long the end of a run waits for steps on their way there"
    ),
    Setting("run", "failures_per_day", 1.0, "of the whole job, for the cost model"),
    Setting("run", "checkpoint_backups", 1, "nodes that back up each rank's checkpoints in memory; 0: none"),
    Setting(
        "run", "checkpoint_backup_rate", 0.0, "bytes a second that a node sends for backups; 0: no limit"
    ),
    Setting("run", "failure_domain", "", "label, e.g. of the rack; backups go to nodes of another one"),
    Setting(
        "run", "standbys", "auto", "warm standby processes; auto: as many as workers, if restarts are wanted"
    ),
    Setting(
        "run",
        "restart_budget",
        "rank=5,node=10,hour=30,same=2",
        "most restarts within an hour for one rank, one node and all; failures at one step with one error",
    ),
    Setting(
        "run",
        "shrink_after_s",
        30.0,
        "how long a node is waited for before a job of MIN:MAX nodes goes on with fewer",
    ),
    Setting("run", "elect", True, "another node hosts the controller when its own is lost"),
    Setting("run", "in_place", False, "at a restart a training that can goes on in its process"),
    Setting("run", "join_timeout_s", 600.0, "how long to wait for the other nodes at the start"),
    Setting("run", "leave_s", 3.0, "with in_place: how long a training may take to be left"),
    Setting("run", "linger_s", 10.0, "how long agent and controller may take after the workers ended"),
)
