"""Runs the tests of one held rank, in the order that was asked for, and never longer than its limit."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from typing import Any

from keepstep.core.validation import DeviceFigure, LinkFigure, RankFigures, Transfer, TransferEndpoint
from keepstep.validate.device_links import LinkError, trains_over_nccl, why_not
from keepstep.validate.device_tests import device_tests
from keepstep.validate.link_tests import MESSAGE_BYTES, OnDevice, Receiver, send

MOST_LIMIT_S = 20.0
MOST_TRANSFERS = 256
MOST_ABORT_S = 2.0
"""How long the training waits, once its hold is over, for a link between devices to be gone."""
_CPU_SCALE = 4  # how much smaller messages are between ranks that compute on the host
_MOST_TEXT = 200


class HeldTests:
    """The tests of a rank that is held. It is ready to take transfers until ``stop``.

    Make it in the training thread: the device that is current there is tested.
    """

    def __init__(self, rank: int, device: str | None = None) -> None:
        self._rank = rank
        self._device = device or _own_device()
        self._receiver = Receiver()
        self._stopped = threading.Event()
        self._link = threading.Lock()

    def endpoint(self) -> dict[str, Any]:
        """Where this rank takes transfers: a ``TransferEndpoint`` as plain values."""
        return asdict(self._receiver.endpoint)

    def run(self, body: dict[str, Any]) -> dict[str, Any]:
        """Run the tests that ``body`` orders (a ``RankTests`` as plain values); returns a ``RankFigures`` as such.

        Raises KeyError, TypeError or ValueError for a body of another form.
        """
        deadline_s = time.monotonic() + min(max(float(body["limit_s"]), 0.0), MOST_LIMIT_S)
        wanted = [Transfer(**one) for one in body["transfers"]][:MOST_TRANSFERS]
        endpoints = {int(rank): TransferEndpoint(**one) for rank, one in body["endpoints"].items()}
        devices: list[DeviceFigure] = []
        links: list[LinkFigure] = []
        missing: list[str] = []

        def running() -> bool:
            return not self._stopped.is_set() and time.monotonic() < deadline_s

        try:
            for found in device_tests(self._rank, self._device, running):
                if isinstance(found, str):
                    missing.append(found[:_MOST_TEXT])
                else:
                    devices.append(found)
        except Exception as error:  # links are tested even when the device's test fails
            missing.append(f"{self._device}: {type(error).__name__}: {error}"[:_MOST_TEXT])
        on_device: OnDevice | None = None
        if wanted and trains_over_nccl(self._device):
            if why := why_not(self._device):
                missing.append(f"tested over TCP: {why}"[:_MOST_TEXT])
            else:
                on_device = OnDevice(self._device, deadline_s, self._stopped, self._link)
        for transfer in sorted(wanted, key=lambda one: one.number):
            if self._stopped.is_set():
                break
            try:
                links += self._test_link(transfer, endpoints, deadline_s, on_device)
            except (OSError, ValueError, KeyError, RuntimeError, LinkError) as error:
                missing.append(f"link {transfer.source} → {transfer.target}: {error}"[:_MOST_TEXT])
        if on_device is not None:
            missing += [f"tested over TCP: {text}"[:_MOST_TEXT] for text in dict.fromkeys(on_device.troubles)]
        return asdict(RankFigures(self._rank, tuple(devices), tuple(links), tuple(missing)))

    def stop(self) -> None:
        """End the tests, as the hold is over.

        A link between devices is aborted first, while the training's are idle; any other test ends by itself.
        """
        self._stopped.set()
        self._receiver.close()
        if self._link.acquire(timeout=MOST_ABORT_S):
            self._link.release()

    def _test_link(
        self,
        transfer: Transfer,
        endpoints: dict[int, TransferEndpoint],
        deadline_s: float,
        on_device: OnDevice | None,
    ) -> list[LinkFigure]:
        """Do this rank's part of a transfer: receive and measure it, or send it."""
        scale = 1 if self._device.startswith("cuda") else _CPU_SCALE
        sizes = tuple(size // scale for size in MESSAGE_BYTES)
        if transfer.target == self._rank:
            return self._receiver.receive(transfer, sizes, deadline_s, on_device)
        if transfer.source == self._rank:
            send(transfer, endpoints[transfer.target], sizes, deadline_s, on_device)
        return []


def _own_device() -> str:
    """The device that is current in this thread."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
