"""Collectives by torch.distributed: gloo on CPU, NCCL on CUDA.

"mean" is a sum and a division, on both backends: gloo has no mean, and two ways would give two roundings. Dtypes that
gloo cannot move (float8) are moved as bytes where nothing is added up, and refused where something is.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_comm.interface import Call, Collectives, CommError, Pending

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_MOVED_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool)


class _Work:
    """torch's work, and what is to be done with its output once it is there. Keeps the input alive until then."""

    def __init__(self, work: Any, finish: Callable[[], Tensor], *, where: str, limit: timedelta | None) -> None:
        self._work, self._finish, self._where, self._limit = work, finish, where, limit

    def wait(self) -> Tensor:
        try:
            if self._work is not None:
                self._work.wait() if self._limit is None else self._work.wait(self._limit)
        except RuntimeError as problem:
            raise CommError(f"{self._where} failed: {problem}") from problem
        self._work = None
        return self._finish()


class TorchCollectives(Collectives):
    """Collectives over a process group. limit: how long one may take; None: the group's own limit."""

    def __init__(self, group: dist.ProcessGroup, *, axis: str, limit: timedelta | None = None) -> None:
        self.axis = axis
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        self.group, self._limit = group, limit

    def launch(self, call: Call) -> Pending:
        begin = getattr(self, "_" + call.kind)
        try:
            work, finish = begin(call, *(() if call.x is None else (call.x.contiguous(),)))
        except RuntimeError as problem:
            raise CommError(f"{self._where(call)} could not start: {problem}") from problem
        return _Work(work, finish, where=self._where(call), limit=self._limit)

    def _where(self, call: Call) -> str:
        return f"rank {self.ranks[self.rank]}: {call.kind} over axis {self.axis!r} (ranks {self.ranks})"

    def _all_gather(self, call: Call, x: Tensor) -> tuple[Any, Callable[[], Tensor]]:
        out = x.new_empty(x.shape[0] * self.size, *x.shape[1:]) if call.out is None else call.out
        if x.numel() == 0:
            return None, lambda: out
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(_as_bytes(out), _as_bytes(x), group=self.group, async_op=True), lambda: out

    def _reduce_scatter(self, call: Call, x: Tensor) -> tuple[Any, Callable[[], Tensor]]:
        self._refuse_bytes(call, x)
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:]) if call.out is None else call.out
        if x.numel() == 0:
            return None, lambda: out
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = scatter(out, x, op=_OPS[call.op], group=self.group, async_op=True)
        return work, lambda: out.div_(self.size) if call.op == "mean" else out

    def _all_reduce(self, call: Call, x: Tensor) -> tuple[Any, Callable[[], Tensor]]:
        self._refuse_bytes(call, x)
        out = x.clone()
        if x.numel() == 0:
            return None, lambda: out
        work = dist.all_reduce(out, op=_OPS[call.op], group=self.group, async_op=True)
        return work, lambda: out.div_(self.size) if call.op == "mean" else out

    def _all_to_all(self, call: Call, x: Tensor) -> tuple[Any, Callable[[], Tensor]]:
        out = x.new_empty(sum(call.receive_rows), *x.shape[1:])
        if x.shape[1:].numel() == 0:
            return None, lambda: out
        work = dist.all_to_all_single(
            _as_bytes(out),
            _as_bytes(x),
            output_split_sizes=list(call.receive_rows),
            input_split_sizes=list(call.send_rows),
            group=self.group,
            async_op=True,
        )
        return work, lambda: out

    def _broadcast(self, call: Call, x: Tensor) -> tuple[Any, Callable[[], Tensor]]:
        out = x.clone()
        if x.numel() == 0:
            return None, lambda: out
        work = dist.broadcast(_as_bytes(out), src=self.ranks[call.source], group=self.group, async_op=True)
        return work, lambda: out

    def _barrier(self, call: Call) -> tuple[Any, Callable[[], Tensor]]:
        return dist.barrier(group=self.group, async_op=True), lambda: torch.empty(0)

    def _refuse_bytes(self, call: Call, x: Tensor) -> None:
        if x.dtype in _MOVED_AS_BYTES:
            raise CommError(f"{self._where(call)}: {x.dtype} cannot be added up on the way; convert x first")


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in _MOVED_AS_BYTES else x
