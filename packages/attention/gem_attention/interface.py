"""What gem_attention promises: one attention call over jagged sequences, and the parts of a block around it.

1.0  first version
1.1  the block around attention: ProjectionSpec, GateSpec, HstuSpec, RecomputeSpec (calls: `block_api`)
1.2  Block: what an implementation of the block's parts provides

The family (softmax JFA, HSTU, GDPA, seed pooling, block attention) is one formula. For sample b, head h, query row i
and key column j, with kv head g = h // (H / Hkv) and f the activation applied to each score on its own:

    s_ij = scale * <q_ih, k_jg> + bias_ij        bias.where == "outside_scale"
    s_ij = scale * (<q_ih, k_jg> + bias_ij)      bias.where == "inside_scale"
    o_ih = 1 / divisor_i * sum_j M_ij * f(s_ij) * v_jg
    o_ih = sum_j softmax_j(s_ij where M_ij else -inf) * v_jg      activation == "softmax"; a row without keys gives 0

`AttentionSpec` says which member of the family is meant; it is hashable, holds no tensor, and serves training and
evaluation alike. `Layout` holds what one batch looks like (offsets, targets, times), is checked once by
`api.make_layout` and shared by all layers; so the call itself never waits for the device and never reads a value.

Letters: T packed tokens, B samples, R kv rows (B unless kv_index), H query heads, G kv heads, D head dim of q and k,
E head dim of v, S seeds, P number of relative positions 2 * max_positions - 1, K time buckets.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from gem_attention.block_validation import check_gate_spec, check_hstu_spec, check_projection_spec
from gem_attention.validation import check_bias_spec, check_mask_spec, check_rotary_spec, check_spec, check_time_buckets

INTERFACE_VERSION = (1, 2)

Activation = Literal["softmax", "silu", "gelu", "gelu_tanh", "gelu_poly", "relu", "relu2", "identity"]
QueryKind = Literal["self", "cross", "broadcast", "tail"]
Semantics = Literal["meta", "nvidia"]
Impl = Literal["reference", "eager", "triton", "gluon", "auto"]
NormKind = Literal["layer", "rms"]
BlockImpl = Literal["reference", "eager", "triton"]


class CannotRunError(ValueError):
    """The asked implementation cannot run here, or cannot run this spec; the message says why."""


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """Which pairs (i, j) of one sample may meet. The default lets all pairs meet.

    A sample of length n is c context tokens, then h = n - c - m history tokens, then m targets. Ranks: context 0;
    history item t has t + 1 (t when c = 0); targets R = h + 1 (h when c = 0) and, with "nvidia", R, R + 1, ...
    `gem_attention.masks.sample_mask` is the definition, in code.

    causal             row i sees column j where i = j or rank_i > rank_j
    targets            the last num_targets[b] tokens of a sample are candidates: they see what lies before, and
                       themselves, never one another (but see target_group_size)
    target_group_size  "nvidia" only: consecutive targets in groups of this size see one another causally
    context            the first num_context[b] tokens are seen by, and see, all context and history, never targets;
                       a window hides them from late history rows (that is what both public systems do)
    window             > 0: only |rank_i - rank_j| <= window; 0: unlimited
    min_full_rows      f > 0: the window is lifted for the last f history rows and for all targets
    block              > 0: a token sees exactly its own block of that many consecutive tokens; no other rule mixes in
    semantics          whose meaning, where two public systems differ: "meta" gives all targets one rank (all see the
                       same window), "nvidia" gives each target its own. Must be named for window with targets, for
                       groups ("nvidia") and for targets without causal ("meta"); elsewhere both agree and None is fine.
    """

    causal: bool = False
    targets: bool = False
    target_group_size: int = 1
    context: bool = False
    window: int = 0
    min_full_rows: int = 0
    block: int = 0
    semantics: Semantics | None = None

    def __post_init__(self) -> None:
        check_mask_spec(self)


@dataclass(frozen=True, kw_only=True)
class TimeBuckets:
    """bucket(dt) = min(floor(f(max(|dt|, 1)) / step), count - 1), f the natural logarithm or the square root, dt in s.

    The exact definition is by integers, `masks.time_boundaries(buckets)`: boundary b (b = 1 .. count - 1) is the
    smallest whole dt whose bucket is at least b, computed in float64; so every implementation agrees bit for bit.
    Example: function "log", step 0.301, count 4 has boundaries (2, 2, 3): dt 0 and 1 -> 0, dt 2 -> 2, dt >= 3 -> 3.
    """

    function: Literal["log", "sqrt"] = "log"
    step: float = 0.301
    count: int = 128

    def __post_init__(self) -> None:
        check_time_buckets(self)


@dataclass(frozen=True, kw_only=True)
class BiasSpec:
    """An additive bias, learned, for query kinds "self" and "tail".

    bias_ij = position_table[h', j - i + max_positions - 1]     where max_positions > 0
            + time_table[h', bucket(t_{i+1} - t_j)]             where time is given; t_{n} is t_{n-1} for the last row

    with i, j positions in the key sequence and h' = h // (H / table heads); no sample may be longer than max_positions.
    where: inside or outside of `scale` (public systems differ, so there is no default).
    """

    where: Literal["inside_scale", "outside_scale"]
    max_positions: int = 0
    time: TimeBuckets | None = None

    def __post_init__(self) -> None:
        check_bias_spec(self)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One member of the family.

    activation  f. "gelu" is exact (erf), "gelu_tanh" the tanh form, "gelu_poly" 0.5 x + 0.3989423 x^2 - 0.0664904 x^4
                + 0.0099736 x^6, within 1.1e-3 of gelu for |x| <= 1, 2.5e-2 for |x| <= 1.5, useless beyond 2 (0.22);
                "relu2" relu(x)^2
    scale       alpha, any finite number; commonly D ** -0.5 (HSTU) or 1 / longest length (GDPA)
    divisor     a positive constant, or "per_token": the call then takes one number per output row. Never the padded
                length of a batch: the result of a sample must not depend on its neighbours. Softmax: 1 only.
    query       "self"       q, k, v share their offsets
                "cross"      q and k have their own offsets; no mask
                "broadcast"  q is dense (S, H, D), the same seeds for every sample; no mask
                "tail"       sample b's queries are the last rows of its (longer or equal) key sequence, as when keys
                             are cached; masks as for "self", rows taken from the end
    """

    activation: Activation
    scale: float
    divisor: float | Literal["per_token"] = 1.0
    query: QueryKind = "self"
    mask: MaskSpec = field(default_factory=MaskSpec)
    bias: BiasSpec | None = None

    def __post_init__(self) -> None:
        check_spec(self)
        # Made here, not when asked for: a compiler can read an attribute, but not trace a JSON encoder.
        object.__setattr__(self, "_text", json.dumps(asdict(self), sort_keys=True))

    def to_text(self) -> str:
        """This spec as JSON with sorted keys; `spec_text.spec_from_text` is the inverse. Equal specs, equal text."""
        text: str = self._text  # type: ignore[attr-defined]
        return text


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """What one batch looks like; build it with `api.make_layout`, which checks it. The constructor trusts its caller.

    Its tensors must not change afterwards: what implementations derive from them is kept with the layout.

    q_offsets    (B + 1,) int64; sample b owns rows q_offsets[b]:q_offsets[b + 1] of q. None: broadcast queries
    k_offsets    (R + 1,) int64; for "self" the same tensor as q_offsets. R = B unless kv_index
    batch_size   B
    total_q, total_k      rows of q (0 for broadcast) and of k: the last offsets, as host numbers
    max_q_len, max_k_len  upper bounds of the lengths, host numbers (0 for broadcast q); they size grids, not results
    num_targets  (B,) int64, when mask.targets          num_context  (B,) int64, when mask.context
    tail         promises that no sample has more queries than keys, as query "tail" needs
    kv_index     (B,) int64, non-decreasing: sample b reads kv row kv_index[b] (impressions that share a request's
                 history); query kinds "cross" and "broadcast". Samples of one row are one run of queries, so
                 `sharing.without_kv_index` rewrites the layout and an implementation need not know about it
    timestamps   (Tk,) int64 seconds, when bias.time; those of one sample span at most 2^31 - 2 (68 years)

    Example, three samples of 2, 0 and 3 tokens: q_offsets = [0, 2, 2, 5], total_q = 5, max_q_len = 3.
    """

    k_offsets: Tensor
    batch_size: int
    total_k: int
    max_k_len: int
    q_offsets: Tensor | None = None
    total_q: int = 0
    max_q_len: int = 0
    tail: bool = False
    num_targets: Tensor | None = None
    num_context: Tensor | None = None
    kv_index: Tensor | None = None
    timestamps: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Rotary embedding of q and k whose phase uses the position and, where time_scale_s is given, the log time gap.

    Pair i (i = 0 .. D/2 - 1) of token t turns by
        angle_ti = position_t * base ** (-2 i / D) + log(1 + age_t / time_scale_s) * time_base ** (-2 i / D)
    age_t: seconds, >= 0, by which the event lies before its sample's reference time (say, the request). Since q and k
    both turn, a score depends on the difference of positions and on the ratio of (shifted) ages.

    pairing   "interleaved": pair i is dims (2 i, 2 i + 1); "halves": dims (i, i + D/2). Public models use both, and
              weights trained with one are wrong with the other, so it is named.
    """

    pairing: Literal["interleaved", "halves"]
    base: float = 10_000.0
    time_scale_s: float | None = None
    time_base: float = 100.0

    def __post_init__(self) -> None:
        check_rotary_spec(self)


@dataclass(frozen=True, kw_only=True)
class ProjectionSpec:
    """The projection in front of attention: output_i = turn_i(act_i(norm(x) @ weight_i^T)), norm without weights.

    widths    of the outputs, in the order of the weight's rows: weight is (sum(widths), D)
    silu      which outputs (by index) go through SiLU
    turned    which outputs are turned by `rotary`, head by head of head_dim columns, after SiLU
    norm, eps as in norms.normalize

    Example: u, v, q, k of 4 heads of 32 out of D = 128, u activated, q and k turned:
        ProjectionSpec(widths=(128,) * 4, silu=(0,), turned=(2, 3), rotary=RotarySpec(pairing="halves"), head_dim=32)
    """

    widths: tuple[int, ...]
    silu: tuple[int, ...] = ()
    turned: tuple[int, ...] = ()
    rotary: RotarySpec | None = None
    head_dim: int = 0
    norm: NormKind = "layer"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_projection_spec(self)
        object.__setattr__(self, "_text", json.dumps(asdict(self), sort_keys=True))

    def to_text(self) -> str:
        """This spec as JSON with sorted keys."""
        text: str = self._text  # type: ignore[attr-defined]
        return text


@dataclass(frozen=True, kw_only=True)
class GateSpec:
    """What follows attention: act(u) * norm(attention), over all heads of a token or over each (per_head)."""

    activation: Literal["none", "silu", "sigmoid"] = "none"
    norm: NormKind = "layer"
    per_head: bool = False
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_gate_spec(self)
        object.__setattr__(self, "_text", json.dumps(asdict(self), sort_keys=True))

    def to_text(self) -> str:
        """This spec as JSON with sorted keys."""
        text: str = self._text  # type: ignore[attr-defined]
        return text


@dataclass(frozen=True, kw_only=True)
class HstuSpec:
    """An HSTU block (arXiv 2402.17152) of width dim: heads of qk_dim (q, k) and v_dim (v; u is heads * v_dim wide).

    activated  "u": only u goes through SiLU (public ranking code); "all": u, v, q and k do (research code)
    """

    dim: int
    heads: int
    qk_dim: int
    v_dim: int
    activated: Literal["u", "all"] = "u"
    rotary: RotarySpec | None = None
    norm: NormKind = "layer"
    eps: float = 1e-5
    per_head: bool = False

    def __post_init__(self) -> None:
        check_hstu_spec(self)
        # Made here, as texts are: a compiler can read an attribute.
        v, qk, every = self.heads * self.v_dim, self.heads * self.qk_dim, self.activated == "all"
        projection = ProjectionSpec(
            widths=(v, v, qk, qk),
            silu=(0, 1, 2, 3) if every else (),
            turned=(2, 3) if self.rotary is not None else (),
            rotary=self.rotary,
            head_dim=self.qk_dim,
            norm=self.norm,
            eps=self.eps,
        )
        gate = GateSpec(activation="none" if every else "silu", norm=self.norm, per_head=self.per_head, eps=self.eps)
        object.__setattr__(self, "_parts", (projection, gate))

    @property
    def projection(self) -> ProjectionSpec:
        """x to u, v, q, k. With "u" the activation is left to the gate, which then needs no second copy of u."""
        spec: ProjectionSpec = self._parts[0]  # type: ignore[attr-defined]
        return spec

    @property
    def gate(self) -> GateSpec:
        """What is between attention and the output projection."""
        spec: GateSpec = self._parts[1]  # type: ignore[attr-defined]
        return spec


@dataclass(frozen=True, kw_only=True)
class RecomputeSpec:
    """What may not be kept for the backward, which then rebuilds it. Results and gradients stay the same bits.

    normed_x        norm(x). The Triton path never forms it, so there the flag changes nothing
    preactivations  what a SiLU inside the projection acted on: costs that part of the projection again
    gated           act(u) * norm(attention), the input of the output projection: one more write in a pass made anyway
    projected       u, v, q, k themselves: costs the whole projection again
    `block_counting.saved_bytes_per_token` says what each is worth.
    """

    normed_x: bool = False
    preactivations: bool = False
    gated: bool = False
    projected: bool = False


class Attention(Protocol):
    """One implementation. `api.attention` checks every argument, then calls one of these, chosen by name.

    q (Tq, H, D), or (S, H, D) for broadcast; k (Tk, G, D); v (Tk, G, E); one floating dtype, one device; H a multiple
    of G; any strides. position_table (Hb, P) and time_table (Hb, K): Hb divides H; float32 or q's dtype; their
    gradients are exact. divisor: (Tq,), or (B * S,) for broadcast (row b * S + s), float32 or q's dtype, positive,
    no gradient; when spec.divisor == "per_token".

    Returns (Tq, H, E), for broadcast (B, S, H, E), in q's dtype, contiguous; differentiable in q, k, v and both tables,
    whichever of them want a gradient. Samples and batches without queries or keys are fine: a row without keys gives 0.
    The call changes none of its inputs, and one layout may serve calls of different specs.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        spec: AttentionSpec,
        layout: Layout,
        position_table: Tensor | None = None,
        time_table: Tensor | None = None,
        divisor: Tensor | None = None,
    ) -> Tensor: ...


class Block(Protocol):
    """One implementation of the parts around attention: an object or a module. `block_api` says what each call means.

    x (T, D), weight (sum of widths, D) or (D, C), attention (T, H, E), u (T, C = H * E), residual (T, D): one floating
    dtype, one device, any strides. table (T, head_dim) as `block_api.rotary_table` makes it, float32 (float64 with
    float64), no gradient; if and only if outputs are turned. Differentiable in all others, whichever of them want a
    gradient. Inputs are not changed; results are in the inputs' dtype; T may be 0. Of `recompute`, which changes no
    bit, norm_linear reads normed_x and preactivations, gated_linear reads gated; more may be kept than is asked.
    """

    def norm_linear(
        self,
        x_TD: Tensor,
        weight_ND: Tensor,
        *,
        spec: ProjectionSpec,
        table: Tensor | None = None,
        recompute: RecomputeSpec | None = None,
    ) -> tuple[Tensor, ...]:
        """turn(act(norm(x) @ weight_i^T)): one tensor (T, width) for each width of the spec."""
        ...

    def gated(self, attention_THE: Tensor, u_TC: Tensor, *, spec: GateSpec) -> Tensor:
        """act(u) * norm(attention), (T, C)."""
        ...

    def gated_linear(
        self,
        attention_THE: Tensor,
        u_TC: Tensor,
        weight_DC: Tensor,
        residual_TD: Tensor | None = None,
        *,
        spec: GateSpec,
        recompute: RecomputeSpec | None = None,
    ) -> Tensor:
        """residual + gated @ weight^T, (T, D)."""
        ...
