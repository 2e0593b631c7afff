"""Launches of the Gluon kernels: descriptors, the list of portions, one program a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_attention.gluon_backward import gluon_dkv_kernel, gluon_dq_kernel
from gem_attention.gluon_forward import gluon_forward_kernel
from gem_attention.triton_config import Kernel, Tiles
from gem_attention.triton_launch import (
    Gradients,
    Problem,
    batch_arguments,
    compile_spec,
    empty_gradients,
    key_tiles,
    query_tiles,
    rows_last,
    run_numbers,
    short_query_backward,
    takes_short_queries,
    tma_fits,
)

DIMS = (128,)  # at 64 the activation, not the products, sets the pace, and impl="triton" with more warps is faster
_BILLION = 2**30
_MANY = 0x7FFF0000
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Rows of a streamed tile, how many of them are in flight, and (dk, dv) how many resident tiles have room.

    own: each warpgroup takes, of the blocks its tile visits, only those its own 64 rows need; else both take all.
    """

    block: int = 64
    stages: int = 4
    slots: int = 2
    own: bool = False


def ragged(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """A descriptor of (rows, 1 head, width) tiles of x (T, H, D) that clips at a sequence's end.

    The two extra dims in front use the 64-bit wrap-around of addresses: see triton.tools.ragged_tma, whose device
    functions turn (start, length, row) into coordinates.
    """
    shape = [1, 1, rows, 1, width]
    layout = gl.NVMMASharedLayout.get_default_for(shape, _DTYPES[x.dtype])
    stride = x.stride(0)
    return TensorDescriptor(
        x,
        [_MANY, _MANY, _BILLION, x.shape[1], x.shape[2]],
        [2**34 - stride, stride, *x.stride()],
        shape,
        layout,
    )


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Programs of a persistent grid: one a multiprocessor (132 for a device that is not here)."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def _portions(tiles: Tensor, unit: int, heads: int, programs: int) -> tuple[int, int]:
    items = tiles.shape[0] // unit * heads
    return items, -(-items // programs)


def default_choice(p: Problem, kernel: Kernel) -> Choice:
    """What a kernel runs with when nothing is named; see benchmarks/gpu/NOTES-attention.md.

    A warpgroup that visits only its own blocks wins forward and in dq under a causal mask (4 to 6 %) or a window
    (20 %), and in dk and dv with a window only. Without a mask both visit the same blocks, and asking costs up to 6 %.
    """
    mask = p.spec.mask
    own = bool(mask.window) if kernel == "dkv" else bool(mask.causal or mask.window)
    return Choice(stages=4 if kernel == "forward" else 3, own=own)


def forward(p: Problem, choice: Choice | None = None) -> tuple[Tensor, Tensor]:
    """(out (rows, H, E), an empty tensor in the place of softmax's log-sum-exp)."""
    q, k, v = rows_last(p.q), rows_last(p.k), rows_last(p.v)
    p = p._replace(q=q, k=k, v=v)
    out = torch.empty(p.out_shape(), dtype=q.dtype, device=q.device)
    lse = torch.empty(0, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if k.shape[0] == 0:
        return out.zero_(), lse
    choice = choice or default_choice(p, "forward")
    c = compile_spec(p, Tiles(block_m=128, block_n=choice.block, tma=True))
    unit = 2 if p.spec.mask.causal else 1
    tiles = query_tiles(p, 128, paired=unit == 2)
    programs = multiprocessors(q.device)
    arguments: list[Any] = [
        ragged(q, 64, c.block_d),
        ragged(k, c.block_n, c.block_d),
        ragged(v, c.block_n, c.block_e),
        ragged(out, 64, c.block_e),
        tiles,
        batch_arguments(p),
        run_numbers(p),
        *_portions(tiles, unit, c.heads, programs),
    ]
    gluon_forward_kernel[(programs,)](*arguments, C=c, UNIT=unit, STAGES=choice.stages, OWN=choice.own, num_warps=4)
    return out, lse


def backward(p: Problem, do: Tensor, out: Tensor | None, lse: Tensor, *, short_queries: int = 0) -> Gradients:
    """Gradients of q, k and v. out and lse are softmax's and unused."""
    del out, lse
    q, k, v, do = rows_last(p.q), rows_last(p.k), rows_last(p.v), rows_last(do)
    do = do if tma_fits(do) else do.contiguous()
    p = p._replace(q=q, k=k, v=v)
    grads = empty_gradients(p)
    if do.numel() == 0 or k.shape[0] == 0:
        for grad in grads[:3]:
            grad.zero_()
        return grads
    if short_queries and takes_short_queries(p):
        return short_query_backward(p, do, grads, short_queries)
    run_dq(p, do, grads)
    run_dkv(p, do, grads)
    return grads


def run_dq(p: Problem, do: Tensor, grads: Gradients, choice: Choice | None = None) -> None:
    """Fill grads.dq."""
    choice = choice or default_choice(p, "dq")
    c = compile_spec(p, Tiles(block_m=128, block_n=choice.block, tma=True))
    unit = 2 if p.spec.mask.causal else 1
    tiles = query_tiles(p, 128, paired=unit == 2)
    programs = multiprocessors(p.q.device)
    arguments: list[Any] = [
        ragged(p.q, 64, c.block_d),
        ragged(do, 64, c.block_e),
        ragged(p.k, c.block_n, c.block_d),
        ragged(p.v, c.block_n, c.block_e),
        ragged(grads.dq, 64, c.block_d),
        tiles,
        batch_arguments(p),
        run_numbers(p),
        *_portions(tiles, unit, c.heads, programs),
    ]
    gluon_dq_kernel[(programs,)](*arguments, C=c, UNIT=unit, STAGES=choice.stages, OWN=choice.own, num_warps=4)


def run_dkv(p: Problem, do: Tensor, grads: Gradients, choice: Choice | None = None) -> None:
    """Fill grads.dk and grads.dv."""
    choice = choice or default_choice(p, "dkv")
    c = compile_spec(p, Tiles(block_m=choice.block, block_n=128, tma=True))
    unit = 2 if p.spec.mask.causal else 1
    tiles = key_tiles(p, 128, paired=unit == 2)
    programs = multiprocessors(p.q.device)
    arguments: list[Any] = [
        ragged(p.q, c.block_m, c.block_d),
        ragged(do, c.block_m, c.block_e),
        ragged(p.k, 64, c.block_d),
        ragged(p.v, 64, c.block_e),
        ragged(grads.dk, 64, c.block_d),
        ragged(grads.dv, 64, c.block_e),
        tiles,
        batch_arguments(p),
        run_numbers(p),
        *_portions(tiles, unit, c.kv_heads, programs),
    ]
    options = {"STAGES": choice.stages, "SLOTS": choice.slots, "OWN": choice.own}
    gluon_dkv_kernel[(programs,)](*arguments, C=c, UNIT=unit, **options, num_warps=4)
