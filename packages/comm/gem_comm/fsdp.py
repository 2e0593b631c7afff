"""FSDP2's own communication through Collectives: counted, coded or by peer copies.

    module = fully_shard(module, mesh=meshes.shared)
    module.set_custom_all_gather(FsdpAllGather(comm))           # comm over "shard_expert", or "shard" for experts
    module.set_custom_reduce_scatter(FsdpReduceScatter(comm))

Coded or not is the collectives' business: FSDP2 hands over this rank's flat shard and takes the whole. A shard that is
quantized already (a subclass that codes in `fsdp_pre_all_gather`) arrives as bytes and travels unchanged.

FSDP2 calls these on its own streams and records the events itself, so the call here completes on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from gem_comm.interface import Call, Collectives, CommError, Reduction


def _check_group(comm: Collectives, group: dist.ProcessGroup, what: str) -> None:
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks != comm.ranks:
        raise CommError(
            f"{what}: FSDP shards over ranks {ranks}, the collectives given to it run over axis {comm.axis!r} with "
            f"ranks {comm.ranks}; give it those of its own mesh"
        )


class _Allocates:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class FsdpAllGather(_Allocates, AllGather):
    """For `FSDPModule.set_custom_all_gather`."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        _check_group(self.comm, group, "all-gather")
        self.comm.start(Call(kind="all_gather", x=input_tensor, out=output_tensor)).wait()
        return None


class FsdpReduceScatter(_Allocates, ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`. FSDP2 asks for a sum or a mean."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        _check_group(self.comm, group, "reduce-scatter")
        call = Call(kind="reduce_scatter", x=input_tensor, out=output_tensor, op=_reduction(op))
        self.comm.start(call).wait()
        return None


def _reduction(op: Any) -> Reduction:
    if op == dist.ReduceOp.SUM:
        return "sum"
    if op == dist.ReduceOp.AVG:
        return "mean"
    raise CommError(
        f"FSDP asks for a reduction {op} that is neither sum nor mean; call set_force_sum_reduction_for_comms(True) on "
        "the FSDP module, so that it divides by itself"
    )
