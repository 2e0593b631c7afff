"""Jagged attention, forward and backward, on the CPU: the members of the family that the model uses.

T packed tokens, B samples, H heads, D head dim. Lengths of the ragged inputs are spread over 0 to 4 times their mean,
those of the uniform ones all equal the mean: the same number of tokens, so the two rows of a pair compare directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from cases.case import Case
from cases.counting import count_tensors

SAMPLES, MEAN_LENGTH, HEADS, DIM = 24, 48, 2, 32
# Spread like users' histories: many short, few long, one empty. 24 lengths with a mean of 48.
RAGGED = (0, 1, 2, 4, 7, 9, 12, 15, 18, 21, 24, 28, 32, 37, 42, 48, 55, 63, 72, 83, 96, 128, 163, 192)
SEEDS = 16


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of one attention call and the gradient of its result."""

    q: Any
    k: Any
    v: Any
    grad: Any
    spec: Any
    layout: Any
    pairs: int
    impl: str


def make(*, kind: str, lengths: tuple[int, ...], impl: str) -> Inputs:
    """Inputs of one member: "hstu" (causal SiLU), "softmax" (causal), "gdpa" (cross, GELU), "seeds" (broadcast)."""
    import torch
    from gem_attention.api import make_layout
    from gem_attention.interface import AttentionSpec, MaskSpec

    generator = torch.Generator().manual_seed(1)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total, rows = int(offsets[-1]), {"seeds": SEEDS, "gdpa": SAMPLES * SEEDS}.get(kind, int(offsets[-1]))
    scale, causal = DIM**-0.5, MaskSpec(causal=True)
    spec = {
        "hstu": AttentionSpec(activation="silu", scale=scale, divisor=256.0, mask=causal),
        "softmax": AttentionSpec(activation="softmax", scale=scale, mask=causal),
        "gdpa": AttentionSpec(activation="gelu", scale=1 / 256, query="cross"),
        "seeds": AttentionSpec(activation="gelu", scale=1 / 256, query="broadcast"),
    }[kind]
    layout = {
        "gdpa": lambda: make_layout(q_offsets=torch.arange(SAMPLES + 1) * SEEDS, k_offsets=offsets),
        "seeds": lambda: make_layout(k_offsets=offsets),
    }.get(kind, lambda: make_layout(q_offsets=offsets))()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, HEADS, DIM, generator=generator)

    return Inputs(
        q=normal(rows).requires_grad_(),
        k=normal(total).requires_grad_(),
        v=normal(total).requires_grad_(),
        grad=normal(SAMPLES, SEEDS) if kind == "seeds" else normal(rows),
        spec=spec,
        layout=layout,
        pairs=sum(n * (n + 1) // 2 if spec.mask.causal else n * SEEDS for n in lengths),
        impl=impl,
    )


def run(inputs: Inputs) -> tuple[Any, ...]:
    """Output and the gradients of q, k and v."""
    return run_with(inputs, impl=inputs.impl)


def run_with(inputs: Inputs, *, impl: str, dtype: Any = None) -> tuple[Any, ...]:
    import torch
    from gem_attention.api import attention

    given = (inputs.q, inputs.k, inputs.v)
    q, k, v = given if dtype is None else (x.detach().to(dtype).requires_grad_() for x in given)
    out = attention(q, k, v, spec=inputs.spec, layout=inputs.layout, impl=impl)
    return (out, *torch.autograd.grad(out, (q, k, v), inputs.grad.to(out.dtype)))


def check(inputs: Inputs, result: tuple[Any, ...]) -> None:
    """At most 2 (output) or 3 (gradients) times as far from float64 as the reference in float32."""
    import torch

    exact = run_with(inputs, impl="reference", dtype=torch.float64)
    plain = run_with(inputs, impl="reference")
    for name, factor, ours, theirs, truth in zip(
        ("output", "dq", "dk", "dv"), (2, 3, 3, 3), result, plain, exact, strict=True
    ):
        ours_off, plain_off = ((x.double() - truth).abs().max().item() for x in (ours, theirs))
        ulp = torch.finfo(torch.float32).eps * truth.abs().max().item()
        assert ours_off <= factor * max(plain_off, ulp), f"{name}: off by {ours_off:.2e}, plain float32 {plain_off:.2e}"


def useful_flops(inputs: Inputs) -> dict[str, int]:
    """FLOPs of the pairs that may meet: two products forward, five backward, 2 FLOPs a multiply-add."""
    return {"useful_flops": 14 * inputs.pairs * HEADS * DIM}


def cases(kind: str) -> tuple[Case, ...]:
    shapes = {"ragged": RAGGED, "uniform": (MEAN_LENGTH,) * SAMPLES}
    return tuple(
        Case(
            name=f"attention.{kind}_eager_{shape}",
            make=partial(make, kind=kind, lengths=lengths, impl="eager"),
            run=run,
            check=check,
            count=count_tensors,
            formula=useful_flops,
        )
        for shape, lengths in shapes.items()
    )


CASES = tuple(case for kind in ("hstu", "softmax", "gdpa", "seeds") for case in cases(kind))
