"""For launchers that are started cold, in a namespace: they import torch once for all their workers."""

import os
import sys

import warm_fork

if os.environ.get(warm_fork.ROOM) and sys.orig_argv[1:4] == warm_fork.LAUNCHER:
    warm_fork.hide(os.environ)
    if "torch" in (script := warm_fork.script_of(sys.orig_argv[4:])):
        warm_fork.warm_up(optimizer="optim" in script)
        warm_fork.fork_workers()
warm_fork.hide(os.environ)
sys.path[:] = [path for path in sys.path if path != warm_fork.HERE]
