"""An `Exchange` over a process group, for tests, and what any Exchange must do (public through testing.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_embeddings.interface import Exchange


class _Begun:
    def __init__(self, work: Any, out: Tensor) -> None:
        self._work, self._out = work, out

    def wait(self) -> Tensor:
        self._work.wait()
        return self._out


class GroupExchange:
    """An Exchange over a process group of torch.distributed, for tests."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out, x.contiguous(), group=self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(out, x.contiguous(), group=self.group)
        return out

    def begin(self, kind: str, x: Tensor) -> _Begun:
        size = self.size
        if kind == "all_gather":
            out = x.new_empty(x.shape[0] * size, *x.shape[1:])
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return _Begun(gather(out, x.contiguous(), group=self.group, async_op=True), out)
        out = x.new_empty(x.shape[0] // size, *x.shape[1:])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return _Begun(scatter(out, x.contiguous(), group=self.group, async_op=True), out)

    def all_reduce(self, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=self.group)
        return out


def check_exchange(exchange: Exchange, *, device: str = "cpu") -> None:
    """Call on every rank of the exchange. What all ranks put in is known to each: rank r gives values(r)."""
    size, rank = exchange.size, exchange.rank
    assert 0 <= rank < size, f"rank {rank} of {size}"

    def values(r: int, rows: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(r)
        return torch.randint(-9, 9, (rows, 3), generator=generator).to(dtype)  # sums of whole numbers do not round

    for dtype in (torch.float32, torch.int64):
        for rows in (0, 2):
            mine = values(rank, rows, dtype).to(device)
            given, expected = mine.clone(), torch.cat([values(r, rows, dtype) for r in range(size)])
            _same(exchange.all_gather(mine), expected, f"all_gather of {rows} rows, {dtype}")
            _same(exchange.begin("all_gather", mine).wait(), expected, f"all_gather of {rows} rows, {dtype}, begun")
            _same(mine, given.cpu(), "all_gather changed what it was given")
    for rows in (0, 2):
        mine = values(rank, rows * size, torch.float32).to(device)
        total = torch.stack([values(r, rows * size, torch.float32) for r in range(size)]).sum(0)
        own = total[rows * rank : rows * (rank + 1)]
        _same(exchange.reduce_scatter(mine), own, f"reduce_scatter of {rows} rows a rank")
        _same(exchange.begin("reduce_scatter", mine).wait(), own, f"reduce_scatter of {rows} rows a rank, begun")
        _same(exchange.all_reduce(mine), total, f"all_reduce of {rows * size} rows")
        _same(mine, values(rank, rows * size, torch.float32), "a sum changed what it was given")


def _same(came: Tensor, expected: Tensor, what: str) -> None:
    assert came.dtype == expected.dtype, f"{what}: {came.dtype}, expected {expected.dtype}"
    assert torch.equal(came.cpu(), expected), f"{what}: {came} differs from {expected}"
