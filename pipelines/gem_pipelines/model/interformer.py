"""The cross parts of InterFormer (arXiv 2411.09852): features shape the sequence, the sequence informs the features.

    X_sum = Gate(MLP(X)), n tokens -> n_sum                      FeatureSummary, the way into the sequence
    S' = MHA(PFFN(X_sum, S))                                     InterFormerBlock; PFFN with per-row weights from X_sum
    S_sum = Gate([S_CLS | S_PMA | S_recent])                     InterFormerSummary, the way back

The MLP over tokens is one linear map per dim (TokenMix) followed by a linear map of the width. PFFN is the GDPA form of
Kunlun, which replaced the per-row d x d weight. The candidate's token joins S_sum.
Letters: B rows, T packed tokens, D width of the stream, N summary tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem_pipelines.model.common import Gate, TokenMix, linear
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.kunlun import GdpaPffn, SeedPooling, SelfAttention
from gem_pipelines.model.plan import StreamPlan
from gem_pipelines.model.tokens import Packed


class FeatureSummary(nn.Module):
    """Feature tokens (B, tokens_in, width) -> (B, tokens_out, D): weights for PFFN, or CLS tokens."""

    def __init__(self, tokens_in: int, tokens_out: int, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        self.mix = TokenMix(tokens_in, tokens_out)
        self.project = linear(config.dim, plan.config.dim, bias=config.bias)
        self.gate = Gate(plan.config.dim, bias=config.bias)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.gate(self.project(self.mix(x_BND)))


class InterFormerBlock(nn.Module):
    """x (T, D), weight tokens (B, W, D) -> (T, D)."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        self.feed_forward = GdpaPffn(plan, config)
        self.attention = SelfAttention(plan, config)

    def forward(self, x_TD: Tensor, packed: Packed, weights_BWD: Tensor) -> Tensor:
        return self.attention(self.feed_forward(x_TD, packed, weights_BWD), packed)


class InterFormerSummary(nn.Module):
    """Gate([CLS | pooled by seeds | recent events | candidate]): x (T, D) -> (B, N, D). Missing recent events are 0."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        self.plan = plan
        self.pool = SeedPooling(plan, config)
        self.gate = Gate(plan.config.dim, bias=config.bias)
        recent = plan.config.recent_tokens
        self.extra_tokens = tuple(count for count in (plan.context, recent, plan.targets) if count)

    def forward(self, x_TD: Tensor, packed: Packed) -> Tensor:
        return self.join(*self.parts(x_TD, packed))

    def parts(self, x_TD: Tensor, packed: Packed) -> tuple[Tensor, ...]:
        """All that depends on the rows' lengths: pooled seeds, then CLS, recent events and candidate where they are."""
        tokens = [self.pool.attend(x_TD, packed)]
        if self.plan.context:
            first_B1 = packed.offsets[:-1, None]
            tokens.append(x_TD[first_B1 + torch.arange(self.plan.context, device=x_TD.device)])
        if self.plan.config.recent_tokens:
            if x_TD.shape[0]:
                recent_BRD = x_TD[packed.recent] * packed.is_recent[..., None].to(x_TD.dtype)
            else:
                recent_BRD = x_TD.new_zeros(*packed.recent.shape, x_TD.shape[1])
            tokens.append(recent_BRD)
        if self.plan.targets:
            tokens.append(x_TD[packed.target][:, None])
        return tuple(tokens)

    def join(self, pooled_BSD: Tensor, *others: Tensor) -> Tensor:
        """The tokens, of fixed shapes."""
        tokens = [self.pool.out(pooled_BSD), *others]
        if self.plan.context:
            tokens[:2] = tokens[1::-1]
        return self.gate(torch.cat(tokens, dim=1))
