"""The HSTU block (arXiv 2402.17152): pointwise attention over the whole sequence, gated by the token itself.

    u, v, q, k = split(f1(norm(x)))      only u goes through SiLU, as in the DLRM path of the public code (its research
                                         layer activates all four: another model of the same name)
    a = 1 / S * sum_j M_ij silu(alpha <q_i, k_j>) v_j         alpha = head dim ** -0.5, S a constant of the run
    y = x + f2(u * norm(a))

Causal; the candidate is a target, context tokens are context. No softmax: counts of matching events survive.
`config.hstu` names what computes the first and the last line: PyTorch's layers, or `gem_attention.block_api` on the
same parameters, whose rows are u, v, q, k in either case; so a checkpoint fits both.
Letters: T packed tokens, D width, H heads, K head dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch.nn.functional as F
from gem_attention.api import attention
from gem_attention.block_api import hstu_block
from gem_attention.interface import AttentionSpec, BlockImpl, HstuSpec, MaskSpec, RecomputeSpec
from torch import Tensor, nn

from gem_pipelines.model.common import NORM_EPS, linear, make_norm
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.plan import StreamPlan
from gem_pipelines.model.tokens import Packed, rotary_spec, split_and_turn


@lru_cache
def hstu_spec(plan: StreamPlan) -> AttentionSpec:
    """What the block's attention means."""
    config = plan.config
    mask = MaskSpec(
        causal=True,
        targets=plan.targets > 0,
        context=plan.context > 0,
        window=config.window,
        semantics="meta" if plan.targets and config.window else None,
    )
    return AttentionSpec(activation="silu", scale=(config.dim // config.heads) ** -0.5, divisor=plan.divisor, mask=mask)


def block_spec(plan: StreamPlan, config: ModelConfig) -> HstuSpec:
    """The whole block, as gem_attention names it."""
    dim, heads = plan.config.dim, plan.config.heads
    return HstuSpec(
        dim=dim,
        heads=heads,
        qk_dim=dim // heads,
        v_dim=dim // heads,
        rotary=rotary_spec(plan) if plan.config.rotary else None,
        norm=config.norm,
        eps=NORM_EPS,
    )


class HstuBlock(nn.Module):
    """x (T, D) -> (T, D)."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        self.heads = plan.config.heads
        self.spec = hstu_spec(plan)
        self.rotary = rotary_spec(plan)
        self.impl = config.attention
        self.block = config.hstu
        self.block_spec = block_spec(plan, config)
        self.recompute = RecomputeSpec(**dict.fromkeys(config.hstu_recompute, True))
        dim = plan.config.dim
        self.norm = make_norm(dim, kind=config.norm, affine=config.norm_affine)
        self.uvqk = linear(dim, 4 * dim, bias=config.bias)
        self.attention_norm = make_norm(dim, kind=config.norm, affine=config.norm_affine)
        self.out = linear(dim, dim, bias=config.bias)

    def forward(self, x_TD: Tensor, packed: Packed, weights_BWD: Tensor | None = None) -> Tensor:
        if self.block != "layers":
            return self._fused(x_TD, packed)
        dim = x_TD.shape[-1]
        u_TD, v_TD, qk_TD = self.uvqk(self.norm(x_TD)).split((dim, dim, 2 * dim), dim=-1)
        v_THK = v_TD.unflatten(-1, (self.heads, -1))
        q_THK, k_THK = split_and_turn(qk_TD, self.heads, packed, self.rotary)
        a_THK = attention(q_THK, k_THK, v_THK, spec=self.spec, layout=packed.masked, impl=self.impl)
        gated_TD = F.silu(u_TD) * self.attention_norm(a_THK.flatten(-2))
        return x_TD + self.out(gated_TD)

    def _fused(self, x_TD: Tensor, packed: Packed) -> Tensor:
        return hstu_block(
            x_TD,
            self.uvqk.weight.to(x_TD.dtype),
            self.out.weight.to(x_TD.dtype),
            attention=lambda q, k, v: attention(q, k, v, spec=self.spec, layout=packed.masked, impl=self.impl),
            spec=self.block_spec,
            table=packed.table,
            recompute=self.recompute,
            impl=cast(BlockImpl, self.block),
        )
