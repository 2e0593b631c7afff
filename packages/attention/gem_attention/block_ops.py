"""impl="triton" of the block: operators that hold the launches, and the autograd functions over them.

The operators (`gem_attention::project`, `preactivations`, `project_gradient`, `input_gradient`, `norm_gradient`,
`gate`, `gate_gradient`) let torch.compile trace through and torch.library.opcheck examine; specs travel as text. Plain
matrix products stay with the vendor's library (torch.mm): the weight's gradient is one long reduction, no epilogue.

What is kept for the backward: see block_counting.saved_bytes_per_token.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gem_attention import block_launch
from gem_attention.block_launch import MAX_WIDTH, Stats, interpreted, padded_head
from gem_attention.interface import GateSpec, ProjectionSpec, RotarySpec

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_TOKENS = 2**30


def why_not(x: Tensor, *, norm_width: int, spec: ProjectionSpec | None = None) -> str | None:
    """Why the kernels cannot run on x here, or None."""
    if x.dtype not in _DTYPES:
        return f"dtype {x.dtype} is not among {', '.join(map(str, _DTYPES))}"
    if x.device.type == "cpu" and not interpreted():
        return "tensors are on the CPU, where kernels run in Triton's interpreter only (TRITON_INTERPRET=1)"
    if x.device.type not in ("cpu", "cuda"):
        return f"no kernels for device {x.device}"
    if norm_width > MAX_WIDTH:
        return f"the norm's rows have {norm_width} values: at most {MAX_WIDTH}"
    if spec is not None and padded_head(spec) > 256:
        return f"heads of {spec.head_dim} are turned by halves: at most 256"
    if x.shape[0] >= _MAX_TOKENS:
        return f"{x.shape[0]} tokens: kernels count them in 32 bits, so fewer than {_MAX_TOKENS}"
    return None


@lru_cache(maxsize=256)
def projection_from_text(text: str) -> ProjectionSpec:
    """The inverse of ProjectionSpec.to_text."""
    tree = json.loads(text)
    rotary = None if tree["rotary"] is None else RotarySpec(**tree["rotary"])
    tuples = {name: tuple(tree[name]) for name in ("widths", "silu", "turned")}
    return ProjectionSpec(**{**tree, **tuples, "rotary": rotary})


# ------------------------------------------------------------------------------------------------ operators


@torch.library.custom_op("gem_attention::project", mutates_args=())
def project(x: Tensor, weight: Tensor, table: Tensor | None, spec: str, keep: bool) -> list[Tensor]:
    """Outputs, then the pre-activations that are kept, then mean and rstd."""
    outs, preacts, stats = block_launch.project(x, weight, table, spec=projection_from_text(spec), keep=keep)
    return [*outs, *preacts, *stats]


@project.register_fake
def _(x: Tensor, weight: Tensor, table: Tensor | None, spec: str, keep: bool) -> list[Tensor]:
    meant = projection_from_text(spec)
    kept = [meant.widths[i] for i in sorted(meant.silu)] if keep else []
    outs = [x.new_empty(x.shape[0], width) for width in (*meant.widths, *kept)]
    mean = x.new_empty(x.shape[0] if meant.norm == "layer" else 0, dtype=torch.float32)
    return [*outs, mean, x.new_empty(x.shape[0], dtype=torch.float32)]


@torch.library.custom_op("gem_attention::preactivations", mutates_args=())
def preactivations(x: Tensor, weight: Tensor, spec: str) -> list[Tensor]:
    """What the SiLUs of the projection act on, again: the activated outputs' part of the product."""
    meant = projection_from_text(spec)
    chosen = sorted(meant.silu)
    plain = replace(meant, silu=(), turned=(), rotary=None, widths=tuple(meant.widths[i] for i in chosen))
    rows = torch.split(weight, list(meant.widths))
    own = weight if len(chosen) == len(rows) else torch.cat([rows[i] for i in chosen])
    return block_launch.project(x, own, None, spec=plain)[0]


@preactivations.register_fake
def _(x: Tensor, weight: Tensor, spec: str) -> list[Tensor]:
    meant = projection_from_text(spec)
    return [x.new_empty(x.shape[0], meant.widths[i]) for i in sorted(meant.silu)]


@torch.library.custom_op("gem_attention::project_gradient", mutates_args=())
def project_gradient(
    grads: list[Tensor],
    preacts: list[Tensor],
    weight: Tensor,
    table: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    spec: str,
    dots: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(g, dots, g^T @ mean); see block_launch.gradient."""
    return block_launch.gradient(
        grads, preacts, weight, table, Stats(mean, rstd), spec=projection_from_text(spec), dots=dots
    )


@project_gradient.register_fake
def _(
    grads: list[Tensor], preacts: list[Tensor], weight: Tensor, table: Tensor | None, mean: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, layer = grads[0].shape[0], projection_from_text(rest[1]).norm == "layer"
    g = grads[0].new_empty(tokens, weight.shape[0])
    scalars = g.new_empty(2 if rest[2] else 0, tokens, dtype=torch.float32)
    return g, scalars, g.new_empty(weight.shape[0] if layer else 0, dtype=torch.float32)


@torch.library.custom_op("gem_attention::input_gradient", mutates_args=())
def input_gradient(g: Tensor, weight: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, dots: Tensor, spec: str) -> Tensor:
    """dx from g in one product."""
    return block_launch.input_gradient(g, weight, x, Stats(mean, rstd), dots, spec=projection_from_text(spec))


@torch.library.custom_op("gem_attention::norm_gradient", mutates_args=())
def norm_gradient(product: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, spec: str) -> Tensor:
    """dx from g @ W."""
    return block_launch.norm_gradient(product, x, Stats(mean, rstd), spec=projection_from_text(spec))


@input_gradient.register_fake
def _(g: Tensor, weight: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


@norm_gradient.register_fake
def _(product: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("gem_attention::gate", mutates_args=())
def gate(attention: Tensor, u: Tensor, spec: str) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd)."""
    y, stats = block_launch.gate(attention, u, spec=GateSpec(**json.loads(spec)))
    return y, stats.mean, stats.rstd


@gate.register_fake
def _(attention: Tensor, u: Tensor, spec: str) -> tuple[Tensor, Tensor, Tensor]:
    meant = GateSpec(**json.loads(spec))
    rows = attention.shape[0] * (attention.shape[1] if meant.per_head else 1)
    mean = u.new_empty(rows if meant.norm == "layer" else 0, dtype=torch.float32)
    return u.new_empty(u.shape), mean, u.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("gem_attention::gate_gradient", mutates_args=())
def gate_gradient(
    dy: Tensor, attention: Tensor, u: Tensor, mean: Tensor, rstd: Tensor, spec: str, rebuild: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of attention, of u, y or empty)."""
    return block_launch.gate_gradient(
        dy, attention, u, Stats(mean, rstd), spec=GateSpec(**json.loads(spec)), rebuild=rebuild
    )


@gate_gradient.register_fake
def _(
    dy: Tensor, attention: Tensor, u: Tensor, mean: Tensor, rstd: Tensor, spec: str, rebuild: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = u.new_empty(u.shape if rebuild else (0,))
    return attention.new_empty(attention.shape), u.new_empty(u.shape), y


# ------------------------------------------------------------------------------------------------ autograd


def _weight_gradient(g: Tensor, x: Tensor, mean: Tensor, g_dot_mean: Tensor, spec: ProjectionSpec) -> Tensor:
    """g^T @ (x - mean).

    Half precision: the mean is taken off after the product, in float32, since both terms are large where rows lie far
    from zero. In float32 the product itself could not hold such a difference, so x - mean is formed (and not kept).
    """
    if spec.norm == "rms":
        return torch.mm(g.t(), x)
    if g.dtype == torch.float32:
        return torch.mm(g.t(), x - mean[:, None])
    if g.device.type == "cuda":
        product = torch.mm(g.t(), x, out_dtype=torch.float32)
    else:
        product = torch.mm(g.t().float(), x.float())
    return (product - g_dot_mean[:, None]).to(x.dtype)


class NormLinear(torch.autograd.Function):
    """See block_api.norm_linear. keep: the pre-activations."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, table: Tensor | None, spec: ProjectionSpec, keep: bool
    ) -> tuple[Tensor, ...]:
        made = project(x, weight, table, spec.to_text(), keep)
        count = len(spec.widths)
        ctx.save_for_backward(x, weight, table, *made[count:])
        ctx.spec = spec
        return tuple(made[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, table, *preacts, mean, rstd = ctx.saved_tensors
        spec: ProjectionSpec = ctx.spec
        text = spec.to_text()
        if spec.silu and not preacts:
            preacts = preactivations(x, weight, text)
        dots = len(preacts) == len(spec.widths)
        g, scalars, g_dot_mean = project_gradient(list(grads), preacts, weight, table, mean, rstd, text, dots)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            if dots:
                dx = input_gradient(g, weight, x, mean, rstd, scalars, text)
            else:
                dx = norm_gradient(torch.mm(g, weight), x, mean, rstd, text)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(g, x, mean, g_dot_mean, spec)
        return dx, dw, None, None, None


class Gated(torch.autograd.Function):
    """See block_api.gated."""

    @staticmethod
    def forward(ctx: Any, attention: Tensor, u: Tensor, spec: GateSpec) -> Tensor:
        ctx.text = spec.to_text()
        y, mean, rstd = gate(attention, u, ctx.text)
        ctx.save_for_backward(attention, u, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        da, du, _ = gate_gradient(dy, *ctx.saved_tensors, ctx.text, False)
        return da, du, None


class GatedLinear(torch.autograd.Function):
    """See block_api.gated_linear. keep: the gate's output, which else gate_gradient writes again."""

    @staticmethod
    def forward(
        ctx: Any, attention: Tensor, u: Tensor, weight: Tensor, residual: Tensor | None, spec: GateSpec, keep: bool
    ) -> Tensor:
        ctx.text = spec.to_text()
        y, mean, rstd = gate(attention, u, ctx.text)
        ctx.save_for_backward(attention, u, weight, mean, rstd, y if keep else None)
        return torch.mm(y, weight.t()) if residual is None else torch.addmm(residual, y, weight.t())

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        attention, u, weight, mean, rstd, y = ctx.saved_tensors
        dy = torch.mm(dout, weight)
        da, du, again = gate_gradient(dy, attention, u, mean, rstd, ctx.text, y is None)
        dw = torch.mm(dout.t(), again if y is None else y) if ctx.needs_input_grad[2] else None
        return da, du, dw, dout if ctx.needs_input_grad[3] else None, None, None
