"""All-gather by peer copies over symmetric memory: the copy engines move the data, no SM does.

NCCL's all-gather is a kernel that takes SMs from whatever computes beside it. Here each rank puts its part into a
buffer that its peers can address (torch's symmetric memory), waits until all have (a barrier), copies each peer's part
into its own output (cudaMemcpyAsync over NVLink, by the copy engines), and waits until all are done before the buffer
is used again. The two barriers are kernels of one block. Measured on two H200, 64 MiB a rank under an 8192^3 product:
the product slows by 8.1 %, with NCCL's all-gather by 12.0 % (benchmarks/gpu/comm.py repeats it).

Everything but all_gather goes to `inner`: a sum needs SMs.

Runs where all ranks of the group are CUDA devices that address each other's memory: one host, or one NVLink domain.
Anywhere else it is refused with the reason; nothing falls back. Multicast is not used. The parts that are gathered must
be the same size on all ranks, as the interface demands. The buffer grows to the largest part so far, by a rendezvous of
the group (slow, and in step on all ranks); give `reserve_bytes` to pay at start.

Streams: the copies run on a stream of their own, which waits for the caller's; `wait()` makes the caller's stream wait
for them, so what lies between `start` and `wait` overlaps.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_comm.interface import Call, Collectives, CommError, Pending
from gem_comm.traced import exchange_text

_ALIGNMENT = 1 << 20


def why_not(group: dist.ProcessGroup, device: torch.device | None) -> str | None:
    """Why peer copies cannot run for this group here; None where they can. Not a collective: looks at this rank."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if device is None or device.type != "cuda":
        return f"the device is {device}, expected this rank's CUDA device"
    try:
        import torch.distributed._symmetric_memory as symmetric
    except ImportError as problem:
        return f"torch {torch.__version__} has no symmetric memory ({problem})"
    if not hasattr(symmetric, "rendezvous") or not hasattr(symmetric, "empty"):
        return f"torch {torch.__version__} has no symmetric_memory.empty and rendezvous"
    backend = symmetric.get_backend(device) if hasattr(symmetric, "get_backend") else None
    if backend not in (None, "CUDA"):
        return f"the symmetric memory backend is {backend}, expected CUDA (torch's symmetric_memory.set_backend)"
    count = torch.cuda.device_count()
    if count < group.size():
        return f"this process sees {count} CUDA devices, the group has {group.size()} ranks: one host only"
    index = device.index if device.index is not None else torch.cuda.current_device()
    for other in range(count):
        if other != index and not torch.cuda.can_device_access_peer(index, other):
            return f"device {index} cannot address the memory of device {other}"
    return None


class _Copied:
    def __init__(self, out: Tensor, done: Any) -> None:
        self._out, self._done = out, done

    def wait(self) -> Tensor:
        torch.cuda.current_stream(self._out.device).wait_event(self._done)
        return self._out


class PeerCopyCollectives(Collectives):
    """`inner`, with all_gather by peer copies. Making one is a collective of the group."""

    def __init__(
        self, inner: Collectives, *, group: dist.ProcessGroup, device: torch.device | None, reserve_bytes: int = 0
    ) -> None:
        self.axis, self.ranks, self.rank, self.size = inner.axis, inner.ranks, inner.rank, inner.size
        reason = why_not(group, device)
        if reason is not None:
            raise CommError(f"impl='peer_copy' cannot run over axis {inner.axis!r}: {reason}; use impl='torch'")
        assert device is not None
        hosts = exchange_text(inner, socket.gethostname(), device=device)
        if len(set(hosts)) > 1:
            raise CommError(
                f"impl='peer_copy' cannot run over axis {inner.axis!r}: its ranks {inner.ranks} are on hosts "
                f"{sorted(set(hosts))}, and peer copies work within one host; use impl='torch'"
            )
        self._inner, self._group, self._device = inner, group, device
        self._stream = torch.cuda.Stream(device)
        self._staging: Tensor | None = None
        self._memory: Any = None
        if reserve_bytes:
            self._reserve(reserve_bytes)

    def launch(self, call: Call) -> Pending:
        if call.kind != "all_gather" or call.x is None or call.x.numel() == 0:
            return self._inner.launch(call)
        x = call.x.contiguous()
        if x.device != self._device:
            raise CommError(f"all_gather over {self.axis}: x is on {x.device}, these peer copies run on {self._device}")
        out = x.new_empty(x.shape[0] * self.size, *x.shape[1:]) if call.out is None else call.out
        nbytes = x.numel() * x.element_size()
        self._reserve(nbytes)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy(_bytes_of(x), _bytes_of(out), nbytes)
            done = self._stream.record_event()
        # Memory that the copy stream uses must not be given to others before it is done.
        x.record_stream(self._stream)
        out.record_stream(self._stream)
        return _Copied(out, done)

    def _copy(self, x: Tensor, out: Tensor, nbytes: int) -> None:
        assert self._staging is not None
        self._staging[:nbytes].copy_(x)
        self._memory.barrier(channel=0)
        for step in range(self.size):
            # Each rank starts at another peer, so that no link carries everybody's copies at once.
            peer = (self.rank + step) % self.size
            part = out[peer * nbytes : (peer + 1) * nbytes]
            if peer == self.rank:
                if part.data_ptr() != x.data_ptr():
                    part.copy_(x)
            else:
                part.copy_(self._memory.get_buffer(peer, (nbytes,), torch.uint8))
        self._memory.barrier(channel=0)

    def _reserve(self, nbytes: int) -> None:
        if self._staging is not None and self._staging.numel() >= nbytes:
            return
        import torch.distributed._symmetric_memory as symmetric

        # The old buffer may be in use by copies that were started before: wait for them before it is freed.
        self._stream.synchronize()
        # Twice the last size at least, so that growing sizes do not meet here each time.
        wanted = max(nbytes, 0 if self._staging is None else 2 * self._staging.numel())
        rounded = -(-wanted // _ALIGNMENT) * _ALIGNMENT
        self._staging = symmetric.empty(rounded, dtype=torch.uint8, device=self._device)
        self._memory = symmetric.rendezvous(self._staging, self._group)


def _bytes_of(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
