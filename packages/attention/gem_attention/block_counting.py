"""What the block costs, from shapes alone: FLOPs, bytes of memory traffic, and bytes kept for the backward."""

from __future__ import annotations

from dataclasses import dataclass

from gem_attention.interface import HstuSpec, ProjectionSpec, RecomputeSpec

STATISTIC_BYTES = 4  # mean and rstd are float32


@dataclass(frozen=True, kw_only=True)
class Cost:
    """flops: of matrix products only, 2 a multiply-add. min_bytes: every tensor read or written once."""

    forward_flops: int
    backward_flops: int
    forward_min_bytes: int
    backward_min_bytes: int


def projection_cost(tokens: int, dim: int, spec: ProjectionSpec, *, element_bytes: int = 2) -> Cost:
    """Of norm_linear, pre-activations kept where there are any.

    Example, 131072 tokens, 1024 -> 4096 in bfloat16 with SiLU on all: 1.0995e12 FLOPs forward and twice that backward;
    forward reads x and W and writes outputs and pre-activations, 2.424e9 bytes.
    """
    outputs = sum(spec.widths)
    kept = sum(spec.widths[i] for i in spec.silu)
    flops = 2 * tokens * dim * outputs
    x, weight, y, z = (n * element_bytes for n in (tokens * dim, dim * outputs, tokens * outputs, tokens * kept))
    return Cost(
        forward_flops=flops,
        backward_flops=2 * flops,
        forward_min_bytes=x + weight + y + z,
        backward_min_bytes=2 * x + 2 * weight + y + z,
    )


def gate_bytes(tokens: int, width: int, *, element_bytes: int = 2, rebuild: bool = False) -> tuple[int, int]:
    """(forward, backward) traffic of `gated`: 3 tensors forward, 5 backward, 6 when the output is written again."""
    one = tokens * width * element_bytes
    return 3 * one, (6 if rebuild else 5) * one


def saved_bytes_per_token(
    spec: HstuSpec, recompute: RecomputeSpec | None = None, *, element_bytes: int = 2
) -> dict[str, int]:
    """What hstu_block(impl="triton") keeps of a token between forward and backward, by what it is.

    For an attention that keeps q, k and v and nothing else, as pointwise ones do. Weights and the rotary table are not
    in it. Exact: `block_recompute.SavedBytes` counts the same.

    Example, dim 512, 4 heads of 128, "u", layer norm, bfloat16: x 1024, statistics 8, projected 4096, attention 1024,
    gate statistics 8, gated 1024: 7184; recomputing all leaves 2064.
    """
    recompute = recompute or RecomputeSpec()
    v, qk = spec.heads * spec.v_dim, spec.heads * spec.qk_dim
    statistics = STATISTIC_BYTES * (2 if spec.norm == "layer" else 1)
    projected = (2 * v + 2 * qk) * element_bytes
    keeps_z = spec.activated == "all" and not recompute.preactivations
    return {
        "x": spec.dim * element_bytes,
        "statistics": statistics,
        "preactivations": projected if keeps_z else 0,
        "projected": 0 if recompute.projected else projected,
        "attention": v * element_bytes,
        "gate_statistics": statistics * (spec.heads if spec.per_head else 1),
        "gated": 0 if recompute.gated else v * element_bytes,
    }
