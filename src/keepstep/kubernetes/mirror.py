"""All objects of a kind as the API server has them: listed once, then watched, listed anew whenever that breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from keepstep.core.within import within
from keepstep.kubernetes.actions import Object
from keepstep.kubernetes.cluster_api import FAILURES, NOT_THERE, code_of, plain, told_by

T = TypeVar("T")
_CHUNK = 500
_SERVER_S = 50
"""The API server ends a watch after so long, and it is begun again from where it was."""
_SILENT_S = 120.0
"""When nothing was heard for so long the connection may be dead, and all is listed anew."""
_FIRST_S, _LONGEST_S = 0.2, 10.0


class Mirror(Generic[T]):
    """Objects of one kind. ``found``: by namespace and name, as they are read; ``raw``: as they came."""

    def __init__(
        self,
        client: Any,
        resource: Any,
        kind: type[T],
        changed: Callable[[], None],
        warn: Callable[[str], None],
        *,
        namespace: str | None = None,
        labels: Any = None,
        hint: str = "",
    ) -> None:
        """``hint``: what to do where the API server does not know this kind at all."""
        self._client, self._resource, self._kind = client, resource, kind
        self._changed, self._warn, self._hint = changed, warn, hint
        self._query: dict[str, Any] = {} if namespace is None else {"namespace": namespace}
        self._query |= {} if labels is None else {"labels": labels}
        self._what = f"{resource.__name__.lower()}s{f' in {namespace}' if namespace else ''}"
        self.is_complete = False  # everything is known as it was a moment ago
        self.found: dict[tuple[str, str], T] = {}
        self.raw: dict[tuple[str, str], Object] = {}

    async def run(self) -> None:
        """Go on until cancelled."""
        wait_s = _FIRST_S
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                await self._list_and_watch()
            except FAILURES as error:
                hint = f"; {self._hint}" if self._hint and code_of(error) == NOT_THERE else ""
                if not isinstance(error, asyncio.TimeoutError) and code_of(error) != 410:
                    self._warn(f"{self._what}: {told_by(error)}{hint}")
            lasted_s = asyncio.get_running_loop().time() - began_s
            wait_s = _FIRST_S if lasted_s > _LONGEST_S else min(2 * wait_s, _LONGEST_S)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))

    async def _list_and_watch(self) -> None:
        listing = self._client.list(self._resource, chunk_size=_CHUNK, **self._query)
        objects = [plain(one) async for one in listing]
        self.found, self.raw = {}, {}
        for one in objects:
            self._take(one)
        self.is_complete = True
        self._changed()
        try:
            watching = self._client.watch(
                self._resource,
                server_timeout=_SERVER_S,
                resource_version=listing.resourceVersion,
                **self._query,
            )
            events = aiter(watching)
            while True:
                change, one = await within(_SILENT_S, anext(events))
                if change == "DELETED":
                    self._drop(plain(one))
                elif change in ("ADDED", "MODIFIED"):
                    self._take(plain(one))
                self._changed()
        finally:
            self.is_complete = False

    def _take(self, one: Object) -> None:
        key = _key(one)
        try:
            self.found[key] = msgspec.convert(one, self._kind)
            self.raw[key] = one
        except msgspec.ValidationError as error:
            self._drop(one)
            self._warn(f"{self._what}: {'/'.join(key)} is left alone: {error}")

    def _drop(self, one: Object) -> None:
        self.found.pop(_key(one), None)
        self.raw.pop(_key(one), None)


def _key(one: Object) -> tuple[str, str]:
    meta: Object = one.get("metadata") or {}
    return str(meta.get("namespace") or ""), str(meta.get("name"))
