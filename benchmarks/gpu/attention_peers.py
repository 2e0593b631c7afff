"""Public attention kernels behind one signature, for attention_compare.py.

Read from a folder that is not part of this repository.

PEERS/site must let these be imported: generative_recommenders.ops.triton.triton_hstu_attention (Triton HSTU) and
ads_mkl.ops.oss.gdpa.triton.triton_generalized_dot_product_attention (Triton GDPA; with Triton 3.6 the `object`
annotations of its kernels have to go). PEERS/hstu holds the prebuilt CUTLASS HSTU library, CUDA 12's runtime, and a
shim for it. Each maker returns fn(q, k, v) -> out, differentiable. Their tuners choose among the configurations that
won on this GPU in a full search or came close; a full search takes minutes a shape.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import torch
from attention_shapes import Shape
from gem_attention.masks import time_boundaries
from torch import Tensor

Call = Callable[..., Tensor]

# block_m, block_n, stages, warps (and, backward, whether it is parallel over the sequence)
_HSTU_FWD = {(64, 64, 4, 4), (128, 32, 4, 4), (128, 64, 2, 8), (128, 64, 4, 8)}
_HSTU_BWD = {
    (64, 64, 1, 4, False),
    (64, 64, 2, 4, False),
    (64, 64, 1, 8, False),
    (32, 64, 2, 4, False),
    (32, 128, 2, 8, False),
}
_GDPA_FWD = {(64, 64, 3, 4), (128, 64, 3, 4), (128, 64, 3, 8), (128, 128, 3, 8)}
_GDPA_BWD = {(32, 64, 3, 4), (64, 64, 3, 4), (64, 64, 1, 4), (64, 128, 3, 8)}


def _offsets(lengths: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to("cuda", dtype)


def _targets(shape: Shape, dtype: torch.dtype) -> Tensor | None:
    return torch.tensor(shape.num_targets(), device="cuda", dtype=dtype) if shape.targets else None


def triton_hstu(peers: str, shape: Shape, *, tma: bool) -> Call:
    """generative-recommenders, sequences sorted by length where they differ."""
    _on_path(peers)
    from generative_recommenders.ops.triton import triton_hstu_attention as module

    def key(config):
        kw = config.kwargs
        return kw["BLOCK_M"], kw["BLOCK_N"], config.num_stages, config.num_warps

    fwd, bwd = module._hstu_attn_fwd, module._hstu_attn_bwd
    fwd.configs = [c for c in fwd.configs if key(c) in _HSTU_FWD and not c.kwargs.get("USE_TLX")]
    bwd.configs = [
        c for c in bwd.configs if (*key(c), c.kwargs["SEQUENCE_PARALLEL"]) in _HSTU_BWD and c.kwargs["UNROLL"] == 1
    ]
    longest = max(shape.q_lengths)
    offsets, targets = _offsets(shape.q_lengths, torch.int64), _targets(shape, torch.int64)
    window = max(shape.window - 1, 0)
    ragged = min(shape.q_lengths) != longest

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module.triton_hstu_mha(longest, shape.dim**-0.5, q, k, v, offsets, targets, window, 0, ragged, tma)

    return call


def triton_gdpa(peers: str, shape: Shape, *, options: str) -> Call:
    """ads_model_kernel_library; options "", "tma", "tma persistent". Its TMA backward fails to compile here."""
    _on_path(peers)
    from ads_mkl.ops.oss.gdpa.triton import triton_generalized_dot_product_attention as module

    def keep(configs, allowed, m, n):
        return tuple(c for c in configs if (c.kwargs[m], c.kwargs[n], c.num_stages, c.num_warps) in allowed)

    tables = module.fwd_autotune_configs, module.bwd_autotune_configs
    tables[0]["default"] = keep(tables[0]["default"], _GDPA_FWD, "BLOCK_M", "BLOCK_N")
    tables[1]["default"] = keep(tables[1]["default"], _GDPA_BWD, "BLOCK_M1", "BLOCK_N1")
    q_offsets, k_offsets = (_offsets(n, torch.int32) for n in (shape.q_lengths, shape.k_lengths))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module.generalized_dot_product_attention(
            query=q,
            key=k,
            value=v,
            query_offset=q_offsets,
            key_offset=k_offsets,
            output_offset=q_offsets,
            max_seq_len_q=max(shape.q_lengths),
            max_seq_len_kv=max(shape.k_lengths),
            activation="fast_gelu",
            qk_scale=1.0,
            enable_tma="tma" in options,
            enable_persistent="persistent" in options,
            bwd_opt_tech=options.replace("tma", ""),
        )

    return call


class _CutlassHSTU(torch.autograd.Function):
    """rab: (B, 1, longest, longest), a dense bias of the scores before the factor alpha, or None."""

    @staticmethod
    def forward(ctx, q, k, v, rab, offsets, longest, targets, left, alpha):
        out, padded = torch.ops.fbgemm.hstu_varlen_fwd_90(
            q, k, v, offsets, offsets, longest, longest, None, targets, 1, left, 0, alpha, rab
        )
        ctx.save_for_backward(q, k, v, offsets, targets, None if rab is None else padded)
        ctx.rest = longest, left, alpha
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, offsets, targets, rab = ctx.saved_tensors
        longest, left, alpha = ctx.rest
        dq, dk, dv, d_rab = torch.ops.fbgemm.hstu_varlen_bwd_90(
            grad, q, k, v, offsets, offsets, longest, longest, None, targets, 1, left, 0, alpha, rab, rab is not None
        )
        return dq, dk, dv, None if rab is None else d_rab, None, None, None, None, None


def _load_cutlass(peers: str) -> None:
    folder = os.path.join(peers, "hstu")
    if not hasattr(torch.ops.fbgemm, "hstu_varlen_fwd_90"):
        ctypes.CDLL(os.path.join(folder, "libcudart.so.12"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(os.path.join(folder, "cudart12_shim.so"), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(os.path.join(folder, "hstu.so"))


def cutlass_hstu(peers: str, shape: Shape) -> Call:
    """FBGEMM's prebuilt library for sm_90a."""
    _load_cutlass(peers)
    offsets, targets = _offsets(shape.q_lengths, torch.int32), _targets(shape, torch.int32)
    left = shape.window - 1 if shape.window else -1
    longest = max(shape.q_lengths)
    return lambda q, k, v: _CutlassHSTU.apply(q, k, v, None, offsets, longest, targets, left, shape.dim**-0.5)


def dense_bias(shape: Shape, position: Tensor, time: Tensor) -> Tensor:
    """(B, 1, N, N) of two one-row tables, N the longest length; zero where there is no pair."""
    assert shape.bias is not None
    assert shape.bias.time is not None
    longest = max(shape.q_lengths)
    at = torch.arange(longest, device="cuda")
    by_position = position[0][at - at[:, None] + shape.bias.max_positions - 1]
    edges = torch.tensor(time_boundaries(shape.bias.time), device="cuda")
    dense = position.new_zeros(len(shape.q_lengths), 1, longest, longest)
    for mine, t in zip(
        dense[:, 0], torch.tensor(shape.timestamps(), device="cuda").split(shape.q_lengths), strict=True
    ):
        n = len(t)
        following = torch.cat([t[1:], t[-1:]])
        buckets = torch.bucketize((following[:, None] - t).abs(), edges, right=True)
        mine[:n, :n] = by_position[:n, :n] + time[0][buckets]
    return dense


def cutlass_hstu_dense(peers: str, shape: Shape) -> Call:
    """The same with its dense bias, one for all heads: 8.6 GB at B1r, and as much for its gradient.

    The dense bias is made once, outside the time, and its gradient stays dense: what it costs to come from the tables
    and to return to them is not counted. So the gradients of the tables are None.
    """
    _load_cutlass(peers)
    offsets, targets = _offsets(shape.q_lengths, torch.int32), _targets(shape, torch.int32)
    longest = max(shape.q_lengths)
    made: list[Tensor] = []

    def call(q: Tensor, k: Tensor, v: Tensor, position: Tensor, time: Tensor) -> Tensor:
        if not made:
            made.append(dense_bias(shape, position.detach(), time.detach()))
        return _CutlassHSTU.apply(q, k, v, made[0], offsets, longest, targets, -1, shape.dim**-0.5)

    return call


def contenders(shape: Shape) -> dict[str, Callable[[str], Call]]:
    """Peer name -> maker(peers folder), for one shape."""
    if shape.bias is not None:
        return {
            "CUTLASS HSTU, dense bias": lambda peers: cutlass_hstu_dense(peers, shape),
        }
    if shape.causal:
        return {
            "Triton HSTU": lambda peers: triton_hstu(peers, shape, tma=False),
            "Triton HSTU, TMA": lambda peers: triton_hstu(peers, shape, tma=True),
            "CUTLASS HSTU": lambda peers: cutlass_hstu(peers, shape),
        }
    return {
        "Triton GDPA": lambda peers: triton_gdpa(peers, shape, options=""),
        "Triton GDPA, TMA persistent": lambda peers: triton_gdpa(peers, shape, options="tma persistent"),
    }


def _on_path(peers: str) -> None:
    site = os.path.join(peers, "site")
    if site not in sys.path:
        sys.path.insert(0, site)
