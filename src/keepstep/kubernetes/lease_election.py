"""Which of several operators acts: the one that holds the Lease. Pure: a Lease in, a Lease to write out.

Times in a Lease are of other machines' clocks and are never compared with ours. As client-go does, an operator counts
from the moment in which it saw the Lease change, by its own steady clock; and who holds it stops acting well before
others may take it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

LEASE_S = 15.0
RENEW_S = 3.0
"""How often its holder writes the Lease."""
ACT_S = 10.0
"""The holder acts for so long after it began to write the last Lease that the API server took."""

Object = dict[str, Any]


@dataclass(slots=True)
class Election:
    """One operator's part in it. ``me``: differs between all operators."""

    me: str
    _seen: tuple[str, str] = ("", "")  # version and holder of the Lease that was seen last
    _seen_s: float = float("-inf")  # when that was seen first
    _lasts_s: float = LEASE_S
    _acts_until_s: float = float("-inf")
    _tries_s: float = float("-inf")

    def leads(self, now_s: float) -> bool:
        """Whether this operator may act now."""
        return now_s < self._acts_until_s

    def saw(self, lease: Object | None, now_s: float) -> None:
        """Take note of the Lease as it is now; None: there is none."""
        spec: Object = (lease or {}).get("spec") or {}
        meta: Object = (lease or {}).get("metadata") or {}
        version = str(meta.get("resourceVersion", ""))
        seen = (version, str(spec.get("holderIdentity") or ""))
        if seen != self._seen:
            self._seen, self._seen_s = seen, now_s
            told = spec.get("leaseDurationSeconds")
            self._lasts_s = float(told) if isinstance(told, int) and 0 < told <= 3600 else LEASE_S
        if seen[1] != self.me:
            self._acts_until_s = float("-inf")

    def wanted(self, lease: Object | None, now_s: float, unix_s: float) -> Object | None:
        """What the ``spec`` of the Lease is to be, where this operator is to write it now."""
        holder = self._seen[1]
        if holder and holder != self.me and now_s < self._seen_s + self._lasts_s:
            return None
        if holder == self.me and self.leads(now_s) and now_s < self._tries_s + RENEW_S:
            return None
        self._tries_s = now_s
        spec: Object = (lease or {}).get("spec") or {}
        stamp = datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        changes = spec.get("leaseTransitions")
        before = changes if isinstance(changes, int) else 0
        return {
            "holderIdentity": self.me,
            "leaseDurationSeconds": int(LEASE_S),
            "renewTime": stamp,
            "acquireTime": spec.get("acquireTime", stamp) if holder == self.me else stamp,
            "leaseTransitions": before + (holder != self.me and lease is not None),
        }

    def wrote(self, lease: Object, began_s: float) -> None:
        """The API server has taken the Lease, which this operator began to write at that moment."""
        self._seen = (str(lease["metadata"].get("resourceVersion", "")), self.me)
        self._seen_s = began_s
        self._lasts_s = LEASE_S
        self._acts_until_s = began_s + ACT_S
