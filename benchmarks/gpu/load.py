"""Keeps a GPU busy with matrix products, as another process on it would: until stdin ends. Says "busy" at first."""

from __future__ import annotations

import sys
import threading

import torch

SIZE = 8192


def main() -> None:
    one, other = (torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    torch.mm(one, one, out=other)
    torch.cuda.synchronize()
    print("busy", flush=True)
    while not over.is_set():
        for _ in range(20):
            torch.mm(one, one, out=other)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
