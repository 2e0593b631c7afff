"""Numbers between host and device without a wait.

`send` copies from page-locked memory: from any other, torch copies at once, and waits first until the device has done
all it was given so far. `LateRead` is the way back: the copy is asked for now, and what is launched in between runs on.

A plain `.cpu()` waits until the device has done all it was given so far, and then stands idle until the host has
launched again. Here the host waits for the copy alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """`values`, small and on the CPU, on `device`."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class LateRead:
    """`values` as they are at this point of the device's work."""

    def __init__(self, values: Tensor) -> None:
        self._done: Any = None
        self._host = values.detach()
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values.detach(), non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> Tensor:
        """On the CPU."""
        if self._done is not None:
            self._done.synchronize()
        return self._host
