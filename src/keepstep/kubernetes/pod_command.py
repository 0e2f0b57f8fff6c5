"""How the launcher in a pod was told to meet the others: its command, arguments and environment, parsed as it does.

Pure. What is not in the pod is not known: a ConfigMap's values, a configuration file, the image's own environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from keepstep.core.config import CONFIG_FILE, resolve
from keepstep.core.errors import UsageError
from keepstep.kubernetes.actions import Object
from keepstep.kubernetes.objects import Container, Pod
from keepstep.launch.command import flags
from keepstep.launch.command.allocated import fill_from_scheduler
from keepstep.launch.command.meeting import node_range, parse_endpoint, rendezvous_from
from keepstep.launch.command.run_settings import SETTINGS
from keepstep.launch.schedulers.kubernetes import PORT

_PROGRAMS = ("keepstep", "keepstep.cli")
_TLS = ("tls_cert", "tls_key", "tls_ca")
_SETTINGS = [one for one in SETTINGS if one.name in (*_TLS, "controller_listen")]
_MOST_CHARACTERS = 1 << 16
_MOST_WORDS = 1000
_MOST_UNKNOWN = 10
_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")
_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_VOLCANO_LIST = re.compile(r"VC_[A-Z0-9_]+_HOSTS")


@dataclass(frozen=True, slots=True)
class Launch:
    """Where and by what name the controller of a pod's job is asked.

    Attributes:
        run_id: the job's id, by which it knows its own.
        host: host name or address of the pod in which it began; empty: not known.
        port: at which it listens in its pod; 0: in none, as the job has one node.
        has_tls: whether it wants a certificate.
        doubt: why this may be wrong; empty: it is what the launcher makes of it.
    """

    run_id: str
    host: str = ""
    port: int = PORT
    has_tls: bool = False
    doubt: str = ""


def launch_of(pod: Pod) -> Launch:
    """How the launcher in a pod was told to meet the others, or how it usually is where that cannot be seen."""
    container, words = _launcher(pod.spec.containers)
    environ, doubts = dict[str, str](), list[str]()
    try:
        environ, unknown = _environment(container, pod)
        doubts += [f"not in the pod: {', '.join(unknown[:_MOST_UNKNOWN])}"] if unknown else []
        if words is None:
            raise UsageError("no container's command is `keepstep run`")
        found = _parsed([_expanded(one, environ) for one in words], environ, pod)
        if found.port or not doubts:
            return replace(found, doubt="; ".join(doubts))
    except (UsageError, ValueError) as error:  # the latter: a number of thousands of digits
        doubts.append(str(error))
    has_tls = any(environ.get(f"KEEPSTEP_{name.upper()}") for name in _TLS)
    return Launch(re.sub(r"-[0-9]+$", "", pod.hostname), has_tls=has_tls, doubt="; ".join(doubts))


def _launcher(containers: Sequence[Container]) -> tuple[Container, list[str] | None]:
    """The container that runs a launcher, else the first; and the words after ``keepstep run``."""
    for one in containers:
        words = [*(one.command or ()), *(one.args or ())]
        for at in range(1, len(words)):
            if words[at] == "run" and PurePosixPath(words[at - 1]).name in _PROGRAMS:
                return one, words[at + 1 :]
    return containers[0] if containers else Container(), None


def _parsed(words: list[str], environ: Mapping[str, str], pod: Pod) -> Launch:
    """As `launch.command.job.job_from_command_line` does. Raises UsageError as that does."""
    _bounded(sum(map(len, words)))
    if len(words) > _MOST_WORDS:  # the parser's time grows with their square
        raise UsageError(f"its command has more than {_MOST_WORDS} words")
    given = flags.parse(words, environ, add_help=False)
    domain = f".{pod.spec.subdomain}.{pod.metadata.namespace}.svc" if pod.spec.subdomain else ""
    fill_from_scheduler(given, environ, f"{pod.hostname}{domain}")
    told = {one.name: getattr(given, one.name) for one in _SETTINGS}
    value = {name: str(one.value) for name, one in resolve(_SETTINGS, environ=environ, flags=told).items()}
    meeting = rendezvous_from(given, node_range(given.nnodes)[1], 0.0).endpoint
    if meeting is None:
        return Launch(given.rdzv_id, port=0)
    listen = value["controller_listen"]
    port = parse_endpoint("--controller-listen", listen, 0).port if listen else meeting.port
    if not port:
        raise UsageError(f"--controller-listen {listen}: any free port")
    has_tls = any(value[name] for name in _TLS)
    return Launch(given.rdzv_id, meeting.host, port, has_tls)


# --- the environment ------------------------------------------------------------------------------------------------


def _environment(container: Container, pod: Pod) -> tuple[dict[str, str], list[str]]:
    """A container's variables, as far as the pod has their values; and the names of the others.

    Raises UsageError where they are too long.
    """
    environ = {"KUBERNETES_SERVICE_HOST": "kubernetes", "HOSTNAME": pod.hostname}
    unknown, size = [_source(one) for one in container.env_from or ()], 0
    for one in container.env or ():
        value = _expanded(one.value, environ) if one.value_from is None else _field(one.value_from, pod)
        environ.pop(one.name, None)
        _bounded(size := size + len(value or ""))
        if one.name.startswith("SLURM"):
            continue  # Slurm sets its own where a step begins, and a list of nodes may stand for gigabytes
        if value is None:
            unknown.append(one.name)
        else:
            environ[one.name] = value
    if environ.get(CONFIG_FILE):
        unknown.append(f"{CONFIG_FILE}'s file")
    if sum(_VOLCANO_LIST.fullmatch(name) is not None for name in unknown) == 1:
        # Volcano's list of hosts is in a ConfigMap; it begins with the pod's own name, numbered from 0 on.
        environ["JOB_COMPLETION_INDEX"] = environ.pop("VC_TASK_INDEX", "")
    return environ, unknown


def _source(one: Mapping[str, Any]) -> str:
    named: Object = one.get("configMapRef") or one.get("secretRef") or {}
    return f"all of {named.get('name', '')}"


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """A text in which ``$(NAME)`` stands for a variable, as a kubelet reads it.

    Raises UsageError where it is too long.
    """

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environ.get(found[1], found[0])

    _bounded(len(text) + sum(len(value(one)) for one in _REFERENCE.finditer(text)))
    return _REFERENCE.sub(value, text)


def _bounded(characters: int) -> None:
    if characters > _MOST_CHARACTERS:
        raise UsageError(f"its command or environment has more than {_MOST_CHARACTERS} characters")


def _field(source: Mapping[str, Any], pod: Pod) -> str | None:
    """The value of a variable that is taken from a field of the pod; None for one from elsewhere."""
    field: Object = source.get("fieldRef") or {}
    path = str(field.get("fieldPath") or "")
    meta = pod.metadata
    if found := _FIELD.fullmatch(path):
        return ((meta.labels if found[1] == "labels" else meta.annotations) or {}).get(found[2], "")
    return {
        "metadata.name": meta.name,
        "metadata.namespace": meta.namespace,
        "metadata.uid": meta.uid,
        "spec.nodeName": pod.spec.node_name,
        "status.podIP": pod.status.pod_i_p,
    }.get(path)
