"""What the candidate finds in a stream: unnormalised sums over the events, weighted by how alike the ids are.

    o_f = 1 / sqrt(S) * sum_j silu(<norm(c_f), W_f norm(e_jf)> / sqrt(E)) v_jf        for every field f that both have
    token = g([o_1 | o_2 ...])

e_jf is event j's embedding of field f, c_f the candidate's from the same table, W_f starts as the identity: from the
first step on, an event of the candidate's own topic weighs about sqrt(E), an unrelated one about 0, however small the
tables' start values. v_j = MLP(token j), so that what an action counts can depend on its age.

The sequence blocks normalise what they read, and the summaries once more, so how MUCH of the past matches is lost on
that way: this token keeps it. It is pointwise attention (GDPA) with one query a row and a head a field. The divisor is
a constant of the run: the square root of the longest length, since matches among unrelated events add up like a random
walk.
Letters: B rows, N events, F fields known of the candidate, E table width, D width of the stream.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from gem_attention.api import attention, make_layout
from gem_attention.interface import AttentionSpec
from torch import Tensor, nn

from gem_pipelines.model.common import NORM_EPS, Mlp, linear, to_compute
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.inputs import ModelInput
from gem_pipelines.model.plan import StreamPlan
from gem_pipelines.model.repeat import of_impressions
from gem_pipelines.model.tokens import Packed


@lru_cache
def read_spec(plan: StreamPlan, table_dim: int) -> AttentionSpec:
    """What the read means."""
    return AttentionSpec(activation="silu", scale=table_dim**-0.5, divisor=plan.divisor**0.5, query="cross")


class TargetRead(nn.Module):
    """Embeddings of events and candidate, the stream's first tokens (T, D) -> (B, 1, width of the features)."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        self.name = plan.name
        self.pairs = plan.matched
        self.spec = read_spec(plan, config.table_dim)
        self.impl = config.attention
        self.config = config
        fields, width = len(self.pairs), config.table_dim
        self.match_FEE = nn.Parameter(torch.eye(width).repeat(fields, 1, 1))
        self.value = Mlp((plan.config.dim, plan.config.dim, fields * width), bias=config.bias)
        self.out = linear(fields * width, config.dim, bias=config.bias)

    def forward(self, inputs: ModelInput, x_TD: Tensor, packed: Packed) -> Tensor:
        stream = inputs.streams[self.name]
        candidates = [of_impressions(inputs, scalar) for _, scalar in self.pairs]
        q_FBE = self._normed(candidates)
        k_FNE = torch.bmm(
            self._normed([inputs.embeddings[field] for field, _ in self.pairs]), self.match_FEE.to(x_TD.dtype)
        )
        v_NFE = self.value(x_TD[packed.events]).unflatten(-1, (len(self.pairs), -1))
        rows, events, requests = q_FBE.shape[1], v_NFE.shape[0], inputs.requests
        layout = make_layout(
            # The candidates of a request are several queries of one row: they read the same keys, where they are.
            q_offsets=torch.arange(rows + 1, device=x_TD.device) if requests is None else requests.offsets,
            k_offsets=stream.offsets,
            max_q_len=1 if requests is None else requests.most,
            max_k_len=stream.max_len,
            total_q=rows,
            total_k=events,
            check_values=False,
        )
        q_BFE, k_NFE = q_FBE.transpose(0, 1), k_FNE.transpose(0, 1)
        o_BFE = attention(q_BFE, k_NFE, v_NFE, spec=self.spec, layout=layout, impl=self.impl)
        return self.out(o_BFE.flatten(-2))[:, None]

    def _normed(self, vectors: list[Tensor]) -> Tensor:
        stacked = to_compute(torch.stack(vectors), self.config)
        return F.layer_norm(stacked, stacked.shape[-1:], eps=NORM_EPS)
