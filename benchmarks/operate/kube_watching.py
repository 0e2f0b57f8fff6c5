"""When what happened to the nodes and pods of a cluster, as the API server tells its administrator."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import suppress

from tests.e2e.kube_api import ApiError, KubeApi, Object

CONDITIONS = "Keepstep"
TAINTS = "keepstep.dev/"
_AGAIN_S = 0.1


class Watching:
    """What was seen first when, in Unix seconds."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._over = threading.Event()
        self.conditions: dict[tuple[str, str], float] = {}  # node, type
        self.taints: dict[tuple[str, str], float] = {}  # node, key
        self.unready: dict[str, float] = {}
        self.left: dict[str, float] = {}  # by a pod's uid: when it was told to end, or had ended
        self.bound: dict[str, tuple[float, str, str]] = {}  # by a pod's uid: when, its index, its node
        for path, changed in (("nodes", self._node), ("pods", self._pod)):
            threading.Thread(target=self._follow, args=(path, changed), daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def of_nodes(self, found: dict[tuple[str, str], float]) -> dict[str, list[str]]:
        """What nodes have ever had, by node."""
        return {
            node: sorted(what for other, what in found if other == node)
            for node in sorted({n for n, _ in found})
        }

    def _follow(self, what: str, changed) -> None:
        path = f"/api/v1/{what}"
        while not self._over.is_set():
            with suppress(ApiError, OSError, http.client.HTTPException, ValueError):
                listed = self._api.get(path)
                for one in listed["items"]:
                    changed(one)
                for _, one in self._api.watch(path, listed["metadata"]["resourceVersion"]):
                    changed(one)
            self._over.wait(_AGAIN_S)

    def _node(self, one: Object) -> None:
        name, now_s = one["metadata"]["name"], time.time()
        for condition in one["status"].get("conditions", []):
            if condition["type"].startswith(CONDITIONS) and condition["status"] == "True":
                self.conditions.setdefault((name, condition["type"]), now_s)
            if condition["type"] == "Ready" and condition["status"] != "True":
                self.unready.setdefault(name, now_s)
        for taint in one["spec"].get("taints", []):
            if taint["key"].startswith(TAINTS):
                self.taints.setdefault((name, taint["key"]), now_s)

    def _pod(self, one: Object) -> None:
        meta, now_s = one["metadata"], time.time()
        if "deletionTimestamp" in meta or one["status"].get("phase") in ("Succeeded", "Failed"):
            self.left.setdefault(meta["uid"], now_s)
        if node := one["spec"].get("nodeName"):
            index = meta.get("labels", {}).get("keepstep.dev/index", "")
            self.bound.setdefault(meta["uid"], (now_s, index, node))
