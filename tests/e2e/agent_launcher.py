"""Plays the launcher in the agent's end-to-end tests: makes rings, starts workers and an agent, restarts the agent.

Arguments: run folder, world size, controller's port, then the script and its arguments. Prints one JSON object with the
pids per line; ends, with everything, when its standard input closes.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys

from keepstep.ring import create


def main() -> None:
    run_dir, world, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master_port = probe.getsockname()[1]
    rings = {rank: f"/proc/{os.getpid()}/fd/{create(4096)}" for rank in range(world)}
    common = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(master_port), OMP_NUM_THREADS="1")
    workers = [
        subprocess.Popen(
            [sys.executable, *sys.argv[4:]],
            env=dict(
                common, KEEPSTEP_RUN_DIR=run_dir, KEEPSTEP_RING=rings[rank], RANK=str(rank), WORLD_SIZE=str(world),
                LOCAL_RANK=str(rank),
            ),
            start_new_session=True,
        )
        for rank in range(world)
    ]  # fmt: skip

    def start_agent() -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "keepstep.agent",
            "--run-dir",
            run_dir,
            "--controller",
            f"127.0.0.1:{port}",
        ]
        command += ["--secret-file", f"{run_dir}/secret", "--node", "here", "--node-rank", "0"]
        for rank, path in rings.items():
            command += ["--ring", f"{rank}={path}"]
        agent = subprocess.Popen(command)
        told = {"launcher": os.getpid(), "workers": [worker.pid for worker in workers], "agent": agent.pid}
        print(json.dumps(told), flush=True)
        return agent

    agent = start_agent()
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        if agent.poll() is not None:
            agent = start_agent()
    for worker in workers:
        worker.kill()
        worker.wait()
    agent.terminate()
    agent.wait(timeout=20)


if __name__ == "__main__":
    main()
