"""The user's home folder, which not every process has: `docker run -u 12345`, `env -i`, some daemons."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path


def home_folder(environ: Mapping[str, str]) -> Path | None:
    """``$HOME``, else the folder that the password database names; None where neither names one."""
    named = environ.get("HOME")
    if not named:
        try:
            named = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return Path(named) if named else None
