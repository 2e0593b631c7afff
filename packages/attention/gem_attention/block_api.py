"""The calls of the block around attention: the projection, the gate, and the HSTU block made of them.

    u, v, q, k = norm_linear(x, uvqk, spec=..., table=..., impl=...)       norm, product, SiLU, rotary
    a          = any attention call
    y          = gated_linear(a, u, out, x, spec=..., impl=...)             act(u) * norm(a), product, residual

impl "reference" is the definition in float32/64, "eager" its steps in the input's dtype, "triton" fused kernels
(GPU, or the CPU in Triton's interpreter). Nothing falls back; CannotRunError says why.
Letters: T tokens, D width, H heads, K head dim of q and k, E head dim of v, C = H * E, N an output's width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gem_attention import block_reference
from gem_attention.block_recompute import Rebuilt
from gem_attention.block_reference import finish, library_norm, products, rotary_table, wide_dtype
from gem_attention.block_validation import check_gate, check_gated_linear, check_norm_linear
from gem_attention.interface import BlockImpl, CannotRunError, GateSpec, HstuSpec, ProjectionSpec, RecomputeSpec

__all__ = ["gated", "gated_linear", "hstu_block", "norm_linear", "rotary_table"]
IMPLEMENTATIONS = ("reference", "eager", "triton")
AttentionCall = Callable[[Tensor, Tensor, Tensor], Tensor]


def norm_linear(
    x_TD: Tensor,
    weight_ND: Tensor,
    *,
    spec: ProjectionSpec,
    table: Tensor | None = None,
    recompute: RecomputeSpec | None = None,
    impl: BlockImpl = "eager",
) -> tuple[Tensor, ...]:
    """One tensor (T, width) for each width of the spec: turn(act(norm(x) @ weight_i^T)), each contiguous for "triton".

    table: rotary_table(angles), (T, K) float32, if and only if outputs are turned. No bias, no norm weights.
    Accuracy: for norm "layer" the mean is taken off after the product; that is exact to float32, so rows whose mean is
    m standard deviations from zero lose a factor m of float32's precision (in bfloat16 x itself loses more).

    Example, "rms", eps 0, one output: x = (3, 4), weight = ((1, 0), (0, 2)) gives (3, 8) / sqrt(12.5) = (0.849, 2.263).
    """
    check_norm_linear(x_TD, weight_ND, table, spec)
    recompute = recompute or RecomputeSpec()
    if _choose(impl, x_TD, norm_width=x_TD.shape[1], spec=spec) == "triton":
        from gem_attention.block_ops import NormLinear

        outs: tuple[Tensor, ...] = NormLinear.apply(x_TD, weight_ND, table, spec, not recompute.preactivations)
        return outs
    if impl == "reference":
        return block_reference.norm_linear(x_TD, weight_ND, spec=spec, table=table, dtype=wide_dtype(x_TD))
    return _eager_norm_linear(x_TD, weight_ND, table, spec, recompute)


def _eager_norm_linear(
    x_TD: Tensor, weight_ND: Tensor, table: Tensor | None, spec: ProjectionSpec, recompute: RecomputeSpec
) -> tuple[Tensor, ...]:
    """The reference's steps in x's dtype, without keeping what `recompute` names."""

    def normed() -> Tensor:
        return library_norm(x_TD, norm=spec.norm, eps=spec.eps)

    normed_TD = normed()
    with Rebuilt([normed_TD], lambda: [normed()], needs=[x_TD], active=recompute.normed_x):
        parts = products(normed_TD, weight_ND, spec)
    drop = recompute.preactivations and bool(spec.silu)
    with Rebuilt(parts, lambda: products(normed(), weight_ND, spec), needs=[x_TD], active=drop):
        return tuple(finish(part, i, table, spec) for i, part in enumerate(parts))


def gated(attention_THE: Tensor, u_TC: Tensor, *, spec: GateSpec, impl: BlockImpl = "eager") -> Tensor:
    """act(u) * norm(attention), (T, C). Kept for the backward by "triton": attention, u and two numbers a row.

    Example, "rms", eps 0, activation "none", one head: attention (3, 4), u (1, 10) -> (0.8485, 11.314).
    """
    check_gate(attention_THE, u_TC)
    width = attention_THE.shape[2] * (1 if spec.per_head else attention_THE.shape[1])
    if _choose(impl, attention_THE, norm_width=width) == "triton":
        from gem_attention.block_ops import Gated

        out: Tensor = Gated.apply(attention_THE, u_TC, spec)
        return out
    if impl == "reference":
        return block_reference.gated(attention_THE, u_TC, spec=spec, dtype=wide_dtype(u_TC))
    return block_reference.gated(attention_THE, u_TC, spec=spec, dtype=u_TC.dtype, normalize=library_norm)


def gated_linear(
    attention_THE: Tensor,
    u_TC: Tensor,
    weight_DC: Tensor,
    residual_TD: Tensor | None = None,
    *,
    spec: GateSpec,
    recompute: RecomputeSpec | None = None,
    impl: BlockImpl = "eager",
) -> Tensor:
    """residual + (act(u) * norm(attention)) @ weight^T, (T, D).

    Example, "rms", eps 0, activation "none": attention (3, 4), u (1, 10), weight ((1, 1),), residual (1,) ->
    1 + 0.8485 + 11.314 = 13.162.
    """
    check_gated_linear(attention_THE, u_TC, weight_DC, residual_TD)
    recompute = recompute or RecomputeSpec()
    width = attention_THE.shape[2] * (1 if spec.per_head else attention_THE.shape[1])
    if _choose(impl, attention_THE, norm_width=width) == "triton":
        from gem_attention.block_ops import GatedLinear

        out: Tensor = GatedLinear.apply(attention_THE, u_TC, weight_DC, residual_TD, spec, not recompute.gated)
        return out
    if impl == "reference":
        return block_reference.gated_linear(
            attention_THE, u_TC, weight_DC, residual_TD, spec=spec, dtype=wide_dtype(u_TC)
        )
    y_TC = gated(attention_THE, u_TC, spec=spec)
    again = Rebuilt(
        [y_TC],
        lambda: [gated(attention_THE, u_TC, spec=spec)],
        needs=[attention_THE, u_TC],
        active=recompute.gated,
    )
    with again:
        return _add(y_TC @ weight_DC.T, residual_TD)


def _add(out_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
    return out_TD if residual_TD is None else residual_TD + out_TD


def hstu_block(
    x_TD: Tensor,
    uvqk_ND: Tensor,
    out_DC: Tensor,
    *,
    attention: AttentionCall,
    spec: HstuSpec,
    table: Tensor | None = None,
    recompute: RecomputeSpec | None = None,
    impl: BlockImpl = "eager",
) -> Tensor:
    """An HSTU block: x + out(act(u) * norm(attention(q, k, v))), u, v, q, k = projection(norm(x)); (T, D).

    attention  (q (T, H, K), k (T, H, K), v (T, H, E)) -> (T, H, E): a function over api.attention with spec and layout
    uvqk_ND    (2 * H * E + 2 * H * K, D), rows in the order u, v, q, k        out_DC  (D, H * E)

    Example, 2 heads of 4 on tokens of 2 samples (3 and 2 tokens):
        spec = HstuSpec(dim=8, heads=2, qk_dim=4, v_dim=4)
        layout = make_layout(q_offsets=tensor([0, 3, 5]))
        call = lambda q, k, v: attention(q, k, v, spec=attention_spec, layout=layout)
        y = hstu_block(x, uvqk, out, attention=call, spec=spec)         # x (5, 8), uvqk (32, 8), out (8, 8)
    """
    recompute = recompute or RecomputeSpec()
    if x_TD.dim() != 2 or x_TD.shape[1] != spec.dim:
        raise ValueError(f"x: expected (tokens, {spec.dim}), got shape {tuple(x_TD.shape)}")

    def project(keep: RecomputeSpec) -> tuple[Tensor, ...]:
        return norm_linear(x_TD, uvqk_ND, spec=spec.projection, table=table, recompute=keep, impl=impl)

    parts = project(recompute)
    projected = Rebuilt(parts, lambda: project(RecomputeSpec()), needs=[x_TD], active=recompute.projected)
    gate = spec.gate
    with projected:
        u_TC, v_TC, q_TN, k_TN = parts
        a_THE = attention(*(part.unflatten(-1, (spec.heads, -1)) for part in (q_TN, k_TN, v_TC)))
        if impl == "triton":
            return gated_linear(a_THE, u_TC, out_DC, x_TD, spec=gate, recompute=recompute, impl=impl)
        check_gated_linear(a_THE, u_TC, out_DC, x_TD)
        y_TC = gated(a_THE, u_TC, spec=gate, impl=impl)
    u_again = (lambda: projected.get()[0]) if recompute.projected else (lambda: u_TC)
    again = Rebuilt(
        [y_TC],
        lambda: [gated(a_THE, u_again(), spec=gate, impl=impl)],
        needs=[a_THE] if recompute.projected else [a_THE, u_TC],
        active=recompute.gated,
    )
    with again:
        return _add(y_TC @ out_DC.T, x_TD)


def _choose(impl: str, x: Tensor, *, norm_width: int, spec: ProjectionSpec | None = None) -> str:
    """impl, when it exists and can run here."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: expected one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    if impl == "triton":
        try:
            from gem_attention import block_ops
        except ImportError as error:
            raise CannotRunError(f"impl='triton' cannot run here: its module does not import ({error})") from error
        reason = block_ops.why_not(x, norm_width=norm_width, spec=spec)
        if reason is not None:
            raise CannotRunError(f"impl='triton' cannot run here: {reason}")
    return impl
