"""What the candidate finds in a stream: one unnormalised sum over the events, weighted by their match with it.

    o = 1 / sqrt(S) * sum_j silu(alpha <q, k_j>) v_j       q from the candidate's token, k_j and v_j = MLP(token_j)
    token = f(o)                                            from the first tokens, alpha = head dim ** -0.5

The sequence blocks normalise what they read, and the summaries once more, so how MUCH of the past matches is lost on
that way: this token keeps it. It is pointwise attention (GDPA) with the candidate as its only query, so it costs one
row of scores per sample. v is an MLP, so that what an action counts can depend on its age. The divisor is a constant
of the run: the square root, since matches among unrelated events add up like a random walk.
Letters: B rows, T packed tokens, D width of the stream, H heads, K head dim.
"""

from __future__ import annotations

import torch
from gem_attention.api import attention, make_layout
from gem_attention.interface import AttentionSpec
from torch import Tensor, nn

from gem_pipelines.model.common import Mlp, linear
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.plan import StreamPlan
from gem_pipelines.model.tokens import Packed


def read_spec(plan: StreamPlan) -> AttentionSpec:
    """What the read means."""
    scale = (plan.config.dim // plan.config.heads) ** -0.5
    return AttentionSpec(activation="silu", scale=scale, divisor=plan.divisor**0.5, query="cross")


class TargetRead(nn.Module):
    """The stream's first tokens (T, D) -> (B, 1, width of the features)."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        self.heads = plan.config.heads
        self.spec = read_spec(plan)
        self.impl = config.attention
        dim = plan.config.dim
        self.query = linear(dim, dim, bias=config.bias)
        self.key = linear(dim, dim, bias=config.bias)
        self.value = Mlp((dim, dim, dim), bias=config.bias)
        self.out = linear(dim, config.dim, bias=config.bias)

    def forward(self, x_TD: Tensor, packed: Packed) -> Tensor:
        rows = packed.offsets.shape[0] - 1
        layout = make_layout(
            q_offsets=torch.arange(rows + 1, device=x_TD.device),
            k_offsets=packed.offsets,
            max_q_len=1,
            max_k_len=packed.plain.max_k_len,
            total_q=rows,
            total_k=x_TD.shape[0],
            check_values=False,
        )
        q_BHK, k_THK, v_THK = (
            y.unflatten(-1, (self.heads, -1))
            for y in (self.query(x_TD[packed.target[:rows]]), self.key(x_TD), self.value(x_TD))
        )
        o_BHK = attention(q_BHK, k_THK, v_THK, spec=self.spec, layout=layout, impl=self.impl)
        return self.out(o_BHK.flatten(-2))[:, None]
