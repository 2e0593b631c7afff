"""Sequence parts of Kunlun (arXiv 2602.10016), after public notes of it.

GDPA-PFFN   a feed-forward layer whose weights are made from the features: a_t = sum_w gelu(<q_t, k_w> / tau) v_w with
            q = norm(S), k = K-projection and v = V-projection of the row's weight tokens X_sum, per head; plus S.
            Element-wise GELU, no softmax (a public re-implementation has softmax, against the formula), tau a constant.
HSP         learned seeds attend to the tokens (softmax), H (n_seed x d); then SumKronLinear,
            Y = sum_i Z_i^T H W_i, compresses to n_tok < n_seed tokens with few parameters.
Window      softmax self-attention within +-w tokens, both ways, plus a residual.
CompSkip    which layers pool anew is structural: see StreamPlan.refreshes.

Letters: B rows, T packed tokens, D width, H heads, K head dim, W weight tokens, S seeds, N summary tokens, I terms.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from gem_attention.api import attention
from gem_attention.interface import AttentionSpec, MaskSpec
from torch import Tensor, nn

from gem_pipelines.model.common import linear, make_norm
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.inputs import Requests
from gem_pipelines.model.plan import StreamPlan
from gem_pipelines.model.requests import with_candidate
from gem_pipelines.model.tokens import Packed, rotary_spec, split_and_turn


@lru_cache
def pffn_spec(plan: StreamPlan) -> AttentionSpec:
    """Tokens look at the row's weight tokens."""
    return AttentionSpec(activation="gelu", scale=1.0 / plan.divisor, query="cross")


@lru_cache
def self_attention_spec(plan: StreamPlan) -> AttentionSpec:
    """Softmax, both ways, within the stream's window (0: everything)."""
    scale = (plan.config.dim // plan.config.heads) ** -0.5
    return AttentionSpec(activation="softmax", scale=scale, mask=MaskSpec(window=plan.config.window))


@lru_cache
def pooling_spec(plan: StreamPlan) -> AttentionSpec:
    """Seeds look at all tokens of a row."""
    scale = (plan.config.dim // plan.config.heads) ** -0.5
    return AttentionSpec(activation="softmax", scale=scale, query="broadcast")


class GdpaPffn(nn.Module):
    """x (T, D), weight tokens (B, W, D) -> (T, D)."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        dim = plan.config.dim
        self.heads = plan.config.heads
        self.impl = config.attention
        self.spec = pffn_spec(plan)
        self.norm = make_norm(dim, kind=config.norm, affine=config.norm_affine)
        self.keys = linear(dim, dim, bias=config.bias)
        self.values = linear(dim, dim, bias=config.bias)

    def forward(self, x_TD: Tensor, packed: Packed, weights_BWD: Tensor) -> Tensor:
        q_THK = self.norm(x_TD).unflatten(-1, (self.heads, -1))
        k_MHK = self.keys(weights_BWD).flatten(0, 1).unflatten(-1, (self.heads, -1))
        v_MHK = self.values(weights_BWD).flatten(0, 1).unflatten(-1, (self.heads, -1))
        a_THK = attention(q_THK, k_MHK, v_MHK, spec=self.spec, layout=packed.weighted, impl=self.impl)
        return x_TD + a_THK.flatten(-2)


class SelfAttention(nn.Module):
    """Softmax self-attention with residual: x (T, D) -> (T, D); within +-window tokens if the stream has one."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        dim = plan.config.dim
        self.heads = plan.config.heads
        self.rotary = rotary_spec(plan)
        self.impl = config.attention
        self.spec = self_attention_spec(plan)
        self.norm = make_norm(dim, kind=config.norm, affine=config.norm_affine)
        self.qkv = linear(dim, 3 * dim, bias=config.bias)
        self.out = linear(dim, dim, bias=config.bias)

    def forward(self, x_TD: Tensor, packed: Packed, weights_BWD: Tensor | None = None) -> Tensor:
        dim = x_TD.shape[-1]
        qk_TD, v_TD = self.qkv(self.norm(x_TD)).split((2 * dim, dim), dim=-1)
        q_THK, k_THK = split_and_turn(qk_TD, self.heads, packed, self.rotary)
        v_THK = v_TD.unflatten(-1, (self.heads, -1))
        a_THK = attention(q_THK, k_THK, v_THK, spec=self.spec, layout=packed.plain, impl=self.impl)
        return x_TD + self.out(a_THK.flatten(-2))


class SeedPooling(nn.Module):
    """Learned seeds attend to each row's tokens: x (T, D) -> (B, S, D); a row without tokens gives 0."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        dim = plan.config.dim
        self.heads = plan.config.heads
        self.impl = config.attention
        self.spec = pooling_spec(plan)
        self.has_target = plan.targets > 0
        self.seeds_SD = nn.Parameter(torch.empty(plan.config.seeds, dim).normal_(std=1.0))
        self.seed_norm = make_norm(dim, kind=config.norm, affine=config.norm_affine)
        self.norm = make_norm(dim, kind=config.norm, affine=config.norm_affine)
        self.queries = linear(dim, dim, bias=config.bias)
        self.keys_values = linear(dim, 2 * dim, bias=config.bias)
        self.out = linear(dim, dim, bias=config.bias)

    def forward(self, x_TD: Tensor, packed: Packed) -> Tensor:
        return self.out(self.attend(x_TD, packed))

    def attend(self, x_TD: Tensor, packed: Packed) -> Tensor:
        """(B, S, D) before the last linear layer: all that depends on the rows' lengths."""
        q_SHK = self.queries(self.seed_norm(self.seeds_SD.to(x_TD.dtype))).unflatten(-1, (self.heads, -1))
        if packed.requests is not None and self.has_target:
            return self._attend_shared(q_SHK, x_TD, packed, packed.requests)
        k_THK, v_THK = self._keys_values(x_TD)
        pooled_BSHK = attention(q_SHK, k_THK, v_THK, spec=self.spec, layout=packed.pooled, impl=self.impl)
        return pooled_BSHK.flatten(-2)

    def _attend_shared(self, q_SHK: Tensor, x_TD: Tensor, packed: Packed, requests: Requests) -> Tensor:
        """Events are pooled once a request, then each impression's candidate joins (requests.py)."""
        k_NHK, v_NHK = self._keys_values(x_TD[packed.events])
        candidate_k_BHK, candidate_v_BHK = self._keys_values(x_TD[packed.target])
        pooled_RSHK = attention(q_SHK, k_NHK, v_NHK, spec=self.spec, layout=packed.pooled, impl=self.impl)
        pooled_BSHK = with_candidate(
            pooled_RSHK,
            q_SHK,
            k_NHK,
            candidate_k_BHK=candidate_k_BHK,
            candidate_v_BHK=candidate_v_BHK,
            scale=self.spec.scale,
            offsets=packed.pooled.k_offsets,
            requests=requests,
        )
        return pooled_BSHK.flatten(-2)

    def _keys_values(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.keys_values(self.norm(x_TD)).chunk(2, dim=-1)
        return keys.unflatten(-1, (self.heads, -1)), values.unflatten(-1, (self.heads, -1))


class SumKronLinear(nn.Module):
    """Y = sum_i Z_i^T H W_i: (B, S, D) -> (B, N, D), with I * (S * N + D * D) parameters instead of S * N * D * D.

    The token map comes first, since it shrinks: I * B * (S * N * D + N * D * D) multiply-adds.
    """

    def __init__(self, seeds: int, tokens: int, dim: int, *, terms: int) -> None:
        super().__init__()
        self.z_ISN = nn.Parameter(torch.empty(terms, seeds, tokens).normal_(std=(seeds * terms) ** -0.5))
        self.w_IDD = nn.Parameter(torch.empty(terms, dim, dim).normal_(std=dim**-0.5))

    def forward(self, h_BSD: Tensor) -> Tensor:
        mixed_BNID = torch.einsum("isn,bsd->bnid", self.z_ISN.to(h_BSD.dtype), h_BSD)
        return mixed_BNID.flatten(-2) @ self.w_IDD.flatten(0, 1).to(h_BSD.dtype)


class HspSummary(nn.Module):
    """[SumKronLinear of the pooled seeds | the candidate's token]: x (T, D) -> (B, N (+ 1), D)."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        own = plan.config
        self.has_target = plan.targets > 0
        self.extra_tokens = (1,) if plan.targets else ()
        self.pool = SeedPooling(plan, config)
        self.compress = SumKronLinear(own.seeds, own.summary_tokens, own.dim, terms=own.kron_terms)

    def forward(self, x_TD: Tensor, packed: Packed) -> Tensor:
        return self.join(*self.parts(x_TD, packed))

    def parts(self, x_TD: Tensor, packed: Packed) -> tuple[Tensor, ...]:
        """All that depends on the rows' lengths: pooled seeds, and the candidate's token."""
        pooled_BSD = self.pool.attend(x_TD, packed)
        return (pooled_BSD, x_TD[packed.target][:, None]) if self.has_target else (pooled_BSD,)

    def join(self, pooled_BSD: Tensor, *target_B1D: Tensor) -> Tensor:
        """The tokens, of fixed shapes."""
        return torch.cat([self.compress(self.pool.out(pooled_BSD)), *target_B1D], dim=1)
