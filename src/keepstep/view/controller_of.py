"""Where the controller of a run can be asked, and with which secret and certificate."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from keepstep import wire
from keepstep.core.config import config_path, resolve
from keepstep.core.errors import RunError
from keepstep.launch.command.run_settings import SETTINGS
from keepstep.traces import Run


@dataclass(frozen=True, slots=True)
class ControllerOf:
    """The controller of a run: where ``run.json`` says it is, and what a program has to show there."""

    address: str  # as run.json has it
    key: wire.RunKey
    tls: ssl.SSLContext | None

    @property
    def host_and_port(self) -> tuple[str, int]:
        return wire.parse_address(self.address)


def controller_of(run: Run, name: str, only: str) -> ControllerOf:
    """The controller of a living run, as its folder tells.

    ``name`` begins error messages; ``only`` ends them: what needs a running job. Raises RunError where the run has
    ended or is not watched, and KeepstepError where its secret or the certificate cannot be used.
    """
    described = run.describe()
    if run.end() is not None or not described.get("controller"):
        raise RunError(f"{name}: the run has ended or is not watched; {only}")
    options = resolve(SETTINGS, environ=os.environ, path=config_path(os.environ))
    paths = wire.TlsPaths.of(*(str(options[key].value) or None for key in ("tls_cert", "tls_key", "tls_ca")))
    secret = wire.read_secret(Path(str(described["secret_file"])))
    key = wire.RunKey(secret, str(described.get("run_id", wire.UNNAMED)))
    return ControllerOf(str(described["controller"]), key, wire.client_context(paths) if paths else None)
