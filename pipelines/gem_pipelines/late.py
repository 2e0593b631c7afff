"""Numbers of the device that the host reads later: the copy is asked for now, and what is launched in between runs on.

A plain `.cpu()` waits until the device has done all it was given so far, and then stands idle until the host has
launched again. Here the host waits for the copy alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
