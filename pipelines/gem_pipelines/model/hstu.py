"""The HSTU block (arXiv 2402.17152): pointwise attention over the whole sequence, gated by the token itself.

    u, v, q, k = split(f1(norm(x)))      only u goes through SiLU, as in the DLRM path of the public code (its research
                                         layer activates all four: another model of the same name)
    a = 1 / S * sum_j M_ij silu(alpha <q_i, k_j>) v_j         alpha = head dim ** -0.5, S a constant of the run
    y = x + f2(u * norm(a))

Causal; the candidate is a target, context tokens are context. No softmax: counts of matching events survive.
Letters: T packed tokens, D width, H heads, K head dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from gem_attention.api import attention
from gem_attention.interface import AttentionSpec, MaskSpec
from torch import Tensor, nn

from gem_pipelines.model.common import linear, make_norm
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.plan import StreamPlan
from gem_pipelines.model.tokens import Packed, rotary_spec, split_and_turn


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


class HstuBlock(nn.Module):
    """x (T, D) -> (T, D)."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        self.heads = plan.config.heads
        self.spec = hstu_spec(plan)
        self.rotary = rotary_spec(plan)
        self.impl = config.attention
        dim = plan.config.dim
        self.norm = make_norm(dim, kind=config.norm, affine=config.norm_affine)
        self.uvqk = linear(dim, 4 * dim, bias=config.bias)
        self.attention_norm = make_norm(dim, kind=config.norm, affine=config.norm_affine)
        self.out = linear(dim, dim, bias=config.bias)

    def forward(self, x_TD: Tensor, packed: Packed, weights_BWD: Tensor | None = None) -> Tensor:
        dim = x_TD.shape[-1]
        u_TD, v_TD, qk_TD = self.uvqk(self.norm(x_TD)).split((dim, dim, 2 * dim), dim=-1)
        v_THK = v_TD.unflatten(-1, (self.heads, -1))
        q_THK, k_THK = split_and_turn(qk_TD, self.heads, packed.angles, self.rotary)
        a_THK = attention(q_THK, k_THK, v_THK, spec=self.spec, layout=packed.masked, impl=self.impl)
        gated_TD = F.silu(u_TD) * self.attention_norm(a_THK.flatten(-2))
        return x_TD + self.out(gated_TD)
