"""What comes and goes is told a few times, then held back until it is calm, or has stayed."""

from __future__ import annotations

from keepstep.view.notify.told_state import Flap

_MOST_KEYS = 1000


class Flapping:
    """Counts how often incidents of a key come. ``flaps`` is changed in place."""

    def __init__(self, flaps: dict[str, Flap], times: int, window_s: float) -> None:
        self._flaps, self._times, self._window_s = flaps, times, window_s

    def opens(self, key: str, now_s: float) -> bool:
        """Count one that came. Returns whether it is now flapping, so that what follows is held back."""
        flap = self._flaps.setdefault(key, Flap())
        flap.opened_s = [one for one in flap.opened_s if abs(now_s - one) < self._window_s] + [now_s]
        flap.opened_s = flap.opened_s[-self._times :]
        flap.last_s = now_s
        if not flap.is_held and len(flap.opened_s) >= self._times:
            flap.is_held, flap.held_back = True, 0
            return True
        self._forget(now_s)
        return False

    def holds(self, key: str) -> bool:
        """Whether what comes of the key is held back."""
        flap = self._flaps.get(key)
        return flap is not None and flap.is_held

    def hold_back(self, key: str, now_s: float) -> None:
        """Count one that is not told."""
        flap = self._flaps[key]
        flap.held_back, flap.last_s = flap.held_back + 1, now_s

    def closes(self, key: str, now_s: float) -> None:
        """One of the key is over."""
        if (flap := self._flaps.get(key)) is not None:
            flap.last_s = now_s

    def calmed(self, now_s: float) -> list[tuple[str, int]]:
        """Keys of which none came or went for a window, with how many were held back; they are free again."""
        found = [
            (key, flap.held_back)
            for key, flap in self._flaps.items()
            if flap.is_held and abs(now_s - flap.last_s) >= self._window_s
        ]
        for key, _ in found:
            del self._flaps[key]
        return found

    def _forget(self, now_s: float) -> None:
        """Keep the keys few: those that are not held and longest ago go first."""
        if len(self._flaps) <= _MOST_KEYS:
            return
        free = sorted((flap.last_s, key) for key, flap in self._flaps.items() if not flap.is_held)
        for last_s, key in free:
            if abs(now_s - last_s) >= self._window_s or len(self._flaps) > _MOST_KEYS // 2:
                del self._flaps[key]
