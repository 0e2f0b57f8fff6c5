"""Writes what Slurm gives this process's job step to ``FOLDER/JOB-NODE``, as JSON. Arguments: folder, exit code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

if os.environ["LOCAL_RANK"] == "0":
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    shown = subprocess.run(
        ["scontrol", "show", "step", step], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"TRES=(\S+)", shown)
    given = dict(one.split("=") for one in found[1].split(",")) if found else {}
    told = {name: os.environ[name] for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")}
    told["gpus"] = os.environ["SLURM_GPUS_ON_NODE"]
    node = Path(sys.argv[1], f"{os.environ['SLURM_JOB_ID']}-{os.environ['SLURMD_NODENAME']}")
    node.write_text(json.dumps({**given, **told}))
sys.exit(int(sys.argv[2]))
