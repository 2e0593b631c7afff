"""Conformance of an implementation of the block's parts, by the rule of `testing`: against float64, at most 2 times
(forward) or 3 times (backward) as wrong as plain PyTorch in the same dtype. Needs torch only.

    for check in checks(impl="triton", dtypes=(torch.float32,)):
        check()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gem_attention import block_api
from gem_attention.block_reference import rotary_table
from gem_attention.interface import BlockImpl, GateSpec, ProjectionSpec, RecomputeSpec, RotarySpec
from gem_attention.testing import BACKWARD_FACTOR, FORWARD_FACTOR, row_error


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """One spec on one size. center: how many standard deviations x lies from zero."""

    name: str
    tokens: int
    dim: int
    projection: ProjectionSpec | None = None
    gate: GateSpec | None = None
    heads: int = 1
    head_dim: int = 8
    residual: bool = True
    center: float = 0.0
    recompute: RecomputeSpec = field(default_factory=RecomputeSpec)


@dataclass(frozen=True, kw_only=True)
class BlockCheck:
    """Call it; AssertionError says what went wrong."""

    name: str
    run: Callable[[], None]

    def __call__(self) -> None:
        self.run()

    def __str__(self) -> str:
        return self.name


def projection_cases() -> list[BlockCase]:
    """Ragged and tile-edge sizes, widths that are no multiple of a tile, every combination of epilogues once."""
    halves, pairs = RotarySpec(pairing="halves"), RotarySpec(pairing="interleaved", time_scale_s=60.0)
    drop = RecomputeSpec(preactivations=True)

    def case(name: str, tokens: int, dim: int, center: float = 0.0, recompute: RecomputeSpec | None = None, **spec: object) -> BlockCase:  # fmt: skip  # noqa: E501
        projection = ProjectionSpec(**spec)  # type: ignore[arg-type]
        return BlockCase(name=name, tokens=tokens, dim=dim, projection=projection, center=center,
                         recompute=recompute or RecomputeSpec())  # fmt: skip

    return [
        case("layer-plain", 37, 40, widths=(48,)),
        case("rms-plain", 64, 32, widths=(64,), norm="rms"),
        case("layer-silu-all", 33, 24, widths=(24, 24, 56, 24), silu=(0, 1, 2, 3)),
        case("rms-silu-all", 65, 72, widths=(40, 24), silu=(0, 1), norm="rms"),
        case("layer-silu-all-again", 33, 24, widths=(24, 24, 56, 24), silu=(0, 1, 2, 3), recompute=drop),
        case("layer-silu-u", 31, 24, widths=(40, 24, 24), silu=(0,)),
        case("rms-silu-last-again", 31, 24, widths=(40, 24, 24), silu=(2,), norm="rms", recompute=drop),
        case("layer-halves", 50, 40, widths=(32, 16, 48, 48), turned=(2, 3), rotary=halves, head_dim=16),
        case("rms-halves-24", 50, 40, widths=(24, 48, 48), turned=(1, 2), rotary=halves, head_dim=24, norm="rms"),
        case("layer-interleaved-12", 34, 40, widths=(24, 36, 36), turned=(1, 2), rotary=pairs, head_dim=12),
        case("layer-all", 34, 40, widths=(24, 36, 48, 48), silu=(0, 1, 2, 3), turned=(2, 3), rotary=halves,
             head_dim=12),
        case("layer-off-centre", 40, 64, center=6.0, widths=(48, 16), silu=(0, 1)),
        case("rms-off-centre", 40, 64, center=6.0, widths=(48, 16), norm="rms"),
        case("layer-one-token", 1, 16, widths=(16, 16), silu=(0, 1)),
        case("layer-no-tokens", 0, 16, widths=(16, 16), silu=(0, 1)),
        case("rms-no-tokens", 0, 16, widths=(16, 16), norm="rms"),
    ]  # fmt: skip


def gate_cases() -> list[BlockCase]:
    """All activations and norms, over all heads and over each."""
    made = []
    for norm in ("layer", "rms"):
        for activation in ("none", "silu", "sigmoid"):
            for per_head in (False, True):
                made.append(
                    BlockCase(
                        name=f"gate-{norm}-{activation}{'-per-head' if per_head else ''}",
                        tokens=37,
                        dim=20,
                        gate=GateSpec(activation=activation, norm=norm, per_head=per_head),  # type: ignore[arg-type]
                        heads=3,
                        residual=activation != "none",
                        center=2.0 if norm == "layer" else 0.0,
                        recompute=RecomputeSpec(gated=per_head),
                    )
                )
    silu = GateSpec(activation="silu")
    return [*made, BlockCase(name="gate-no-tokens", tokens=0, dim=16, gate=silu, heads=2),
            BlockCase(name="gate-wide", tokens=5, dim=16, gate=silu, heads=130)]  # fmt: skip


def inputs(case: BlockCase, dtype: torch.dtype, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """Leaves by name; values exact in float16 and bfloat16 alike, so that each dtype sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0, center: float = 0.0) -> Tensor:
        x = (torch.randn(*shape, generator=generator) * std + center).to(torch.bfloat16).to(torch.float16)
        return x.to(device, dtype).requires_grad_()

    if case.projection is not None:
        outputs = sum(case.projection.widths)
        x = normal(case.tokens, case.dim, std=0.5, center=0.5 * case.center)
        return {"x": x, "weight": normal(outputs, case.dim, std=case.dim**-0.5)}
    width = case.heads * case.head_dim
    made = {
        "attention": normal(case.tokens, case.heads, case.head_dim, std=0.5, center=0.5 * case.center),
        "u": normal(case.tokens, width),
        "weight": normal(case.dim, width, std=width**-0.5),
    }
    return made | ({"residual": normal(case.tokens, case.dim)} if case.residual else {})


def table_of(case: BlockCase, dtype: torch.dtype, device: str = "cpu") -> Tensor | None:
    """The rotary table of random angles, or None."""
    spec = case.projection
    if spec is None or not spec.turned:
        return None
    angles = torch.rand(case.tokens, spec.head_dim // 2, generator=torch.Generator().manual_seed(7)) * 100
    table = rotary_table(angles.double())
    return table.to(device, torch.float64 if dtype == torch.float64 else torch.float32)


def outcome(case: BlockCase, impl: BlockImpl, dtype: torch.dtype, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """Outputs ("out0", ...) and gradients by name."""
    given = inputs(case, dtype, seed, device)
    outs: tuple[Tensor, ...]
    if case.projection is not None:
        outs = block_api.norm_linear(
            given["x"], given["weight"], spec=case.projection, table=table_of(case, dtype, device),
            recompute=case.recompute, impl=impl,
        )  # fmt: skip
    else:
        assert case.gate is not None
        a, u, weight = given["attention"], given["u"], given["weight"]
        linear = block_api.gated_linear(a, u, weight, given.get("residual"), spec=case.gate, recompute=case.recompute,
                                        impl=impl)  # fmt: skip
        outs = (linear, block_api.gated(a, u, spec=case.gate, impl=impl))
    generator = torch.Generator().manual_seed(seed + 1)
    above = [torch.randn(out.shape, generator=generator).to(torch.bfloat16).to(device, out.dtype) for out in outs]
    grads = torch.autograd.grad(outs, list(given.values()), above)
    return {f"out{i}": out.detach() for i, out in enumerate(outs)} | dict(zip(given, grads, strict=True))


def check(case: BlockCase, impl: BlockImpl, dtype: torch.dtype, device: str = "cpu") -> None:
    """Every output and gradient against float64; the yardstick is the worst of three draws of impl="eager"."""
    actual = outcome(case, impl, dtype, 0, device)
    first = outcome(case, "reference", torch.float64, 0, device)
    allowed: dict[str, float] = {}
    wrong: list[str] = []
    for draw in range(3):
        truth = first if draw == 0 else outcome(case, "reference", torch.float64, 1000 * draw, device)
        plain = outcome(case, "eager", dtype, 1000 * draw, device)
        for name, true in truth.items():
            factor = FORWARD_FACTOR if name.startswith("out") else BACKWARD_FACTOR
            rounding = float(true.abs().max()) * torch.finfo(dtype).eps / 2 if true.numel() else 0.0
            error = max(row_error(plain[name], true), rounding)
            allowed[name] = max(allowed.get(name, 0.0), factor * error)
        for name, true in first.items():
            assert actual[name].shape == true.shape, f"{name}: shape {actual[name].shape}, expected {true.shape}"
            assert actual[name].dtype == dtype, f"{name}: dtype {actual[name].dtype}, expected {dtype}"
        errors = {name: row_error(actual[name], true) for name, true in first.items()}
        wrong = [
            f"{name}: error {errors[name]:.3e}, allowed {allowed[name]:.3e}"
            for name in errors
            if not errors[name] <= allowed[name]
        ]
        if not wrong:
            return
    raise AssertionError(f"{case.name} in {dtype} against float64: {'; '.join(wrong)}")


def checks(*, impl: BlockImpl, dtypes: tuple[torch.dtype, ...], device: str = "cpu") -> list[BlockCheck]:
    """All checks."""
    return [
        BlockCheck(
            name=f"{case.name}-{str(dtype).removeprefix('torch.')}",
            run=lambda case=case, dtype=dtype: check(case, impl, dtype, device),  # type: ignore[misc]
        )
        for case in (*projection_cases(), *gate_cases())
        for dtype in dtypes
    ]
