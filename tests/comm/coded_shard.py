"""A parameter whose FSDP2 shard is coded before it travels: what a low-precision weight does by itself.

FSDP2 calls `fsdp_pre_all_gather` on this rank's shard, gathers what it gave, and hands the whole to
`fsdp_post_all_gather`; our collectives must move such bytes as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from gem_comm.api import make_codec
from torch.utils._pytree import tree_map_only

INT8 = make_codec("int8")
AS_IT_WAS = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
}


class CodedShard(torch.Tensor):
    """(R, D) float32, gathered as int8 with one scale a row."""

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> CodedShard:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
            requires_grad=plain.requires_grad,
        )

    def __init__(self, plain: torch.Tensor) -> None:
        self.plain = plain

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], metadata: None, size: Any, stride: Any) -> CodedShard:
        return CodedShard(inner["plain"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].plain.detach())
        args, kwargs = tree_map_only(cls, lambda shard: shard.plain, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, found) if func in AS_IT_WAS else found

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor], tuple[int]]:
        return (INT8.encode(self.plain),), (self.plain.shape[1],)

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor], columns: tuple[int], dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (payload,) = gathered
        if out is not None:
            out.copy_(INT8.decode(payload, columns[0]))
            return None
        return INT8.decode(payload, columns[0]), (payload,)
