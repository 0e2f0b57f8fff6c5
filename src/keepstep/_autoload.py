"""Entry point of the ``torch.backends`` group: runs inside every ``import torch``.

Inactive (no ``KEEPSTEP_RUN_DIR``) it looks up one environment variable and returns. Active, whatever goes wrong is
said once on stderr, and the script goes on unwatched.
"""

import os


def activate() -> None:
    """Install the probe when ``keepstep run`` started this process; otherwise do nothing. Never raises."""
    if "KEEPSTEP_RUN_DIR" not in os.environ:
        return
    try:
        from keepstep.capture import install

        install()
    except Exception as error:  # the user's script must run, whatever happened to ours
        import sys

        print(f"keepstep: this process trains unwatched: {type(error).__name__}: {error}", file=sys.stderr)
