"""Collectives that autograd goes through, for any implementation.

    forward             backward
    all_gather          reduce_scatter (sum)
    reduce_scatter      all_gather
    all_to_all          all_to_all with send and receive exchanged

These are the exact transposes: the gradient that arrives at a rank's x is the sum over all ranks of what their loss
says about it. Expert parallelism is `all_gather_rows` -> expert on everybody's rows -> `reduce_scatter_rows`.

Every rank of the group must run forward and backward alike; a rank whose result is not used in its loss must still
include it (times 0), or the others wait for it in backward.
Letters: R rows of this rank, n ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gem_comm.interface import Collectives, CommError


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ReduceScatter.apply(grad.contiguous(), ctx.comm), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Collectives) -> Tensor:
        ctx.comm = comm
        return comm.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllGather.apply(grad.contiguous(), ctx.comm), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Collectives, send_rows: tuple[int, ...], receive_rows: tuple[int, ...]
    ) -> Tensor:
        ctx.comm, ctx.send_rows, ctx.receive_rows = comm, send_rows, receive_rows
        return comm.all_to_all(x, send_rows=send_rows, receive_rows=receive_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad.contiguous(), ctx.comm, ctx.receive_rows, ctx.send_rows), None, None, None


def all_gather(x: Tensor, comm: Collectives) -> Tensor:
    """(R, ...) -> (n R, ...); R equal on all ranks. Backward: reduce_scatter."""
    return _AllGather.apply(x, comm)  # type: ignore[no-any-return,no-untyped-call]


def reduce_scatter(x: Tensor, comm: Collectives) -> Tensor:
    """(n R, ...) -> (R, ...), the sum. Backward: all_gather."""
    return _ReduceScatter.apply(x, comm)  # type: ignore[no-any-return,no-untyped-call]


def all_to_all(x: Tensor, comm: Collectives, *, send_rows: Sequence[int], receive_rows: Sequence[int]) -> Tensor:
    """send_rows[j] rows to rank j, receive_rows[j] from it. Backward: the way back."""
    return _AllToAll.apply(x, comm, tuple(send_rows), tuple(receive_rows))  # type: ignore[no-any-return,no-untyped-call]


def exchange_counts(rows: int, comm: Collectives, *, device: torch.device | str = "cpu") -> tuple[int, ...]:
    """Rows of each rank of the group, in rank order. On CUDA the host waits: once a batch, not once a layer."""
    return tuple(comm.all_gather(torch.tensor([rows], dtype=torch.int64, device=device)).tolist())


def all_gather_rows(x: Tensor, comm: Collectives, *, rows: Sequence[int]) -> Tensor:
    """Rows of all ranks where their numbers differ: (rows[rank], ...) -> (sum(rows), ...).

    rows: everybody's counts (`exchange_counts`); 0 is fine. Parts are padded to the longest on the way.
    Example: rank 0 holds rows [a, b, c] and rank 1 [d], rows = (3, 1): both receive [a, b, c, d].
    """
    counts = _check_counts(x.shape[0], comm, rows, what="all_gather_rows", total=False)
    most = max(counts)
    gathered = all_gather(_pad(x, most), comm)
    if all(count == most for count in counts):
        return gathered
    parts = gathered.split(most) if most else [gathered] * comm.size
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def reduce_scatter_rows(x: Tensor, comm: Collectives, *, rows: Sequence[int]) -> Tensor:
    """The sum over ranks of this rank's rows: (sum(rows), ...) -> (rows[rank], ...). Undoes `all_gather_rows`.

    Example: n = 2, rows = (3, 1): rank 1 receives the sum of both ranks' last row.
    """
    counts = _check_counts(x.shape[0], comm, rows, what="reduce_scatter_rows", total=True)
    most = max(counts)
    if any(count != most for count in counts):
        x = torch.cat([_pad(part, most) for part in x.split(list(counts))])
    return reduce_scatter(x, comm)[: counts[comm.rank]]


def _pad(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def _check_counts(given: int, comm: Collectives, rows: Sequence[int], *, what: str, total: bool) -> tuple[int, ...]:
    counts = tuple(rows)
    if len(counts) != comm.size or any(count < 0 for count in counts):
        raise CommError(f"{what} over {comm.axis}: rows is {counts}, expected {comm.size} counts >= 0")
    expected = sum(counts) if total else counts[comm.rank]
    if given != expected:
        raise CommError(f"{what} over {comm.axis}: x has {given} rows, rows = {counts} says {expected}")
    return counts
