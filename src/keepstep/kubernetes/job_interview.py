"""What one job's controller tells the operator: who is asked, by what id, with which secret and certificate."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence

from keepstep import wire
from keepstep.core.errors import UsageError
from keepstep.kubernetes.asking import Asked, certificate_in, secret_in
from keepstep.kubernetes.cluster_api import FAILURES, FORBIDDEN, SECRETS, Api, code_of, told_by
from keepstep.kubernetes.job_plan import NO_ANSWER
from keepstep.kubernetes.objects import Pod
from keepstep.kubernetes.pod_command import Launch, launch_of

_SECRET_S = 60.0
"""How old a secret may be that is used."""


class Interview:
    """One job, whose pods come and go.

    ``told``: what its controller has said in the last round; None where it did not. ``trouble``: reason and message
    why not.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.told: wire.Overview | None = None
        self.trouble: tuple[str, str] = ("", "")
        self._clock = clock
        self._asked = Asked()
        self._launch: tuple[str, Launch] = ("", Launch(""))  # the first pod's, by its uid
        # Name and content of the Secret that the job has.
        self._name, self._data = "", None
        self._data_s = float("-inf")
        self._secret = b""

    async def ask(
        self,
        api: Api,
        namespace: str,
        secret_name: str,
        pods: Sequence[Pod],
        doubt: tuple[str, str] | None = None,
    ) -> None:
        """Ask anew. ``pods``: all of the job's. ``doubt``: reason and message why nobody is asked."""
        self.told, self.trouble = (
            (None, doubt) if doubt else await self._answer(api, namespace, secret_name, pods)
        )

    async def _answer(
        self, api: Api, namespace: str, secret_name: str, pods: Sequence[Pod]
    ) -> tuple[wire.Overview | None, tuple[str, str]]:
        if trouble := await self._get_secret(api, namespace, secret_name):
            return None, trouble
        running = [one for one in pods if one.status.phase == "Running" and one.status.pod_i_p]
        if not running:
            return None, ("NotRunning", "no pod of it runs")
        running.sort(key=lambda one: (len(one.metadata.name), one.metadata.name))  # train-2 before train-10
        launch = self._launch_of(running[0])
        if not launch.port:
            return None, (
                "OneNode",
                "a job of one node tells nobody outside of its pod: read its verdicts there",
            )
        tls: ssl.SSLContext | None = None
        if launch.has_tls:
            try:
                tls = certificate_in(self._data)
            except UsageError as error:
                return None, _without_certificate(namespace, secret_name, str(error))
        first = launch.host.partition(".")[0]
        running.sort(key=lambda one: one.hostname != first and one.status.pod_i_p != launch.host)
        if launch.port != self._asked.port:
            self._asked = Asked(launch.port)
        addresses = [one.status.pod_i_p for one in running]
        told = await self._asked.ask(addresses, self._secret, launch.run_id, tls)
        if told is not None:
            return told, ("", "")
        why = self._asked.trouble
        if tls is not None and "[SSL" in why:
            return None, _without_certificate(namespace, secret_name, why)
        return None, (NO_ANSWER, f"{why}; of its command: {launch.doubt}" if launch.doubt else why)

    def _launch_of(self, pod: Pod) -> Launch:
        if self._launch[0] != pod.metadata.uid:
            self._launch = pod.metadata.uid, launch_of(pod)
        return self._launch[1]

    async def _get_secret(self, api: Api, namespace: str, name: str) -> tuple[str, str] | None:
        """Have the job's secret at hand; reason and message where it cannot be had."""
        if name != self._name:
            self._name, self._secret = name, b""
        if self._secret and self._clock() - self._data_s < _SECRET_S:
            return None
        try:
            found = await api.get(SECRETS, name, namespace)
        except FAILURES as error:
            if self._secret:
                return None  # the API server is away; the job goes on
            reason = "SecretForbidden" if code_of(error) == FORBIDDEN else "SecretUnknown"
            return reason, told_by(error)
        if found is None:
            return "SecretMissing", f"there is no secret {namespace}/{name}"
        self._data, self._data_s = found.get("data"), self._clock()
        self._secret = secret_in(self._data)
        return None if self._secret else ("SecretUnusable", f"{namespace}/{name} has no hexadecimal `secret`")


def _without_certificate(namespace: str, name: str, why: str) -> tuple[str, str]:
    return "TlsUnusable", (
        f"its nodes want a certificate of their authority: put tls.crt, tls.key and ca.crt into the secret "
        f"{namespace}/{name}; {why}"
    )
