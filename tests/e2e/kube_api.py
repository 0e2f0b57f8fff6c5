"""What the tests ask of an API server of Kubernetes: objects as they are in JSON, without a client library."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import yaml

Object = dict[str, Any]
STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"
_TIMEOUT_S = 10.0


class ApiError(Exception):
    """The API server refused something."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"{code}: {said}")
        self.code = code


@dataclass
class KubeApi:
    """One user of an API server. A call opens a connection of its own, so that threads may share this."""

    server: str  # https://HOST:PORT
    ca: Path
    token: str
    _plurals: dict[tuple[str, str], tuple[str, bool]] = field(default_factory=dict)

    def call(
        self, method: str, path: str, body: object = None, *, kind: str = "application/json", **query: object
    ) -> Object:
        """The answer to one request."""
        with closing(self._connection(_TIMEOUT_S)) as connection:
            return json.loads(self._asked(connection, method, path, body, kind, query).read() or "{}")

    def get(self, path: str, **query: str) -> Object:
        return self.call("GET", path, **query)

    def post(self, path: str, body: object) -> Object:
        return self.call("POST", path, body)

    def patch(self, path: str, body: object, kind: str = STRATEGIC) -> Object:
        return self.call("PATCH", path, body, kind=kind)

    def delete(self, path: str, **options: object) -> Object:
        return self.call("DELETE", path, options)

    def watch(self, path: str, version: str, timeout_s: int = 60) -> Iterator[tuple[str, Object]]:
        """Each change after a version, until the server ends it: its type and the object."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": timeout_s}
        with closing(self._connection(timeout_s + _TIMEOUT_S)) as connection:
            for line in self._asked(connection, "GET", path, None, "", query):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(event["object"].get("code", 0), event["object"].get("message", ""))
                yield event["type"], event["object"]

    def apply(self, manifests: str, namespace: str = "default") -> None:
        """Make or change the objects of a YAML text, as ``kubectl apply --server-side`` does."""
        for one in yaml.safe_load_all(manifests):
            if one is not None:
                path = f"{self.path_of(one, namespace)}/{one['metadata']['name']}"
                self.call("PATCH", path, one, kind=_APPLY, fieldManager="tests", force="true")

    def path_of(self, one: Object, namespace: str = "default") -> str:
        """The path of all objects of this one's kind, in its namespace or else the given one."""
        version, kind = one["apiVersion"], one["kind"]
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if (version, kind) not in self._plurals:
            for found in self.get(base)["resources"]:
                if "/" not in found["name"]:
                    self._plurals[version, found["kind"]] = found["name"], found["namespaced"]
        plural, namespaced = self._plurals[version, kind]
        inside = f"/namespaces/{one['metadata'].get('namespace', namespace)}" if namespaced else ""
        return f"{base}{inside}/{plural}"

    def _connection(self, timeout_s: float) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self.ca))
        return http.client.HTTPSConnection(urlsplit(self.server).netloc, timeout=timeout_s, context=context)

    def _asked(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        body: object,
        kind: str,
        query: dict[str, Any],
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self.token}"}
        if body is not None:
            headers["Content-Type"] = kind
        url = f"{path}?{urlencode(query)}" if query else path
        connection.request(method, url, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status >= 300:
            told = answer.read().decode(errors="replace")
            raise ApiError(answer.status, f"{method} {path}: {told}")
        return answer
