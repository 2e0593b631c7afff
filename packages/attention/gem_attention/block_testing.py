"""Conformance of an implementation of the block's parts, here or in another repository. Needs torch only.

    from gem_attention.block_testing import BlockQuirks, conformance
    from gem_attention.testing import summary
    CHECKS = conformance(BlockQuirks(dtypes=(torch.float32,)))
    @pytest.mark.parametrize("check", CHECKS, ids=str)
    def test_conforms(check):
        check(my_block)              # an object or module as interface.Block describes; named("triton") is one of ours

The rule for errors is that of `testing`: against float64, at most 2 times (forward) or 3 times (backward) as wrong as
plain PyTorch, which is impl="eager", in the same dtype. Besides: inputs stay as they were and may have any strides,
whichever of them want a gradient get one, an output that nothing is derived from counts as gradient zero, and what
RecomputeSpec names changes no bit.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from gem_attention import block_api
from gem_attention.block_reference import rotary_table
from gem_attention.interface import Block, BlockImpl, GateSpec, ProjectionSpec, RecomputeSpec, RotarySpec
from gem_attention.testing_cases import laid_out
from gem_attention.testing_checks import BACKWARD_FACTOR, FORWARD_FACTOR, changed, memory_of, row_error


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """One spec on one size. center: how many standard deviations x lies from zero.

    strided   inputs and gradients are slices of wider tensors whose rest is NaN
    core      a case that must be run: an implementation that refuses all of them proves nothing
    """

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
    strided: bool = False
    core: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockQuirks:
    """What an implementation does not claim, as data.

    refuses        a case for which this returns a reason is listed as skipped, with that reason
    deterministic  False: two runs may differ in bits; these checks are listed as skipped
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    device: str = "cpu"
    refuses: Callable[[BlockCase], str | None] = field(default=lambda case: None)
    deterministic: bool = True


@dataclass(frozen=True, kw_only=True)
class BlockCheck:
    """Call it with the implementation; AssertionError says what went wrong. skipped: as in testing.Check."""

    name: str
    run: Callable[[Block], None]
    skipped: str | None = None

    def __call__(self, block: Block) -> None:
        if self.skipped is not None:
            raise unittest.SkipTest(self.skipped)
        self.run(block)

    def __str__(self) -> str:
        return self.name


def named(impl: BlockImpl) -> Block:
    """The implementation of this package with that name."""
    calls = ("norm_linear", "gated", "gated_linear")
    return cast(Block, SimpleNamespace(**{name: partial(getattr(block_api, name), impl=impl) for name in calls}))


def projection_cases() -> list[BlockCase]:
    """Ragged and tile-edge sizes, widths that are no multiple of a tile, every combination of epilogues once."""
    halves, pairs = RotarySpec(pairing="halves"), RotarySpec(pairing="interleaved", time_scale_s=60.0)
    drop = RecomputeSpec(preactivations=True)

    def case(
        name: str, tokens: int, dim: int, *, center: float = 0.0, recompute: RecomputeSpec | None = None,
        strided: bool = False, core: bool = False, **spec: object,
    ) -> BlockCase:  # fmt: skip
        projection = ProjectionSpec(**spec)  # type: ignore[arg-type]
        return BlockCase(name=name, tokens=tokens, dim=dim, projection=projection, center=center, strided=strided,
                         core=core, recompute=recompute or RecomputeSpec())  # fmt: skip

    return [
        case("layer-plain", 37, 40, widths=(48,), core=True),
        case("rms-plain", 64, 32, widths=(64,), norm="rms", core=True),
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
        case("layer-large-eps", 33, 24, widths=(24, 16), silu=(0,), eps=0.5),
        case("rms-large-eps", 33, 24, widths=(24, 16), silu=(1,), norm="rms", eps=0.5),
        case("layer-strided", 33, 24, strided=True, widths=(24, 24, 16), silu=(0,), turned=(1,), rotary=halves,
             head_dim=12),
        case("rms-strided", 33, 24, strided=True, widths=(24, 16), silu=(0, 1), norm="rms"),
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
    silu, rms = GateSpec(activation="silu"), GateSpec(activation="sigmoid", norm="rms", per_head=True)
    made.append(BlockCase(name="gate-strided", tokens=37, dim=20, gate=silu, heads=3, strided=True))
    made.append(BlockCase(name="gate-strided-per-head", tokens=37, dim=20, gate=rms, heads=3, strided=True))
    for spec in (silu, rms):
        name = f"gate-{spec.norm}-large-eps"
        made.append(BlockCase(name=name, tokens=37, dim=20, gate=replace(spec, eps=0.5), heads=3))
    made[0] = replace(made[0], core=True)
    return [*made, BlockCase(name="gate-no-tokens", tokens=0, dim=16, gate=silu, heads=2),
            BlockCase(name="gate-wide", tokens=5, dim=16, gate=silu, heads=130)]  # fmt: skip


def inputs(case: BlockCase, dtype: torch.dtype, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """The floating inputs by name; values exact in float16 and bfloat16 alike: each dtype sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0, center: float = 0.0) -> Tensor:
        x = (torch.randn(*shape, generator=generator) * std + center).to(torch.bfloat16).to(torch.float16)
        return laid_out(x.to(device, dtype), "fused" if case.strided else "").requires_grad_()

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


def outcome(
    case: BlockCase,
    block: Block,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    device: str = "cpu",
    wants: Collection[str] | None = None,
    used: int | None = None,
) -> dict[str, Tensor]:
    """Outputs ("out0", ...) and gradients by name.

    wants: the inputs that want a gradient (None: all); used: the only output that something is derived from.
    """
    given, table = inputs(case, dtype, seed, device), table_of(case, dtype, device)
    leaves = {name: x for name, x in given.items() if wants is None or name in wants}
    for name, x in given.items():
        x.requires_grad_(name in leaves)
    generator = torch.Generator().manual_seed(seed + 1)

    def above(out: Tensor) -> Tensor:
        x = torch.randn(out.shape, generator=generator).to(torch.bfloat16).to(device, out.dtype)
        return laid_out(x, "fused" if case.strided else "")

    watched = given if table is None else given | {"table": table}
    before = memory_of(watched)
    outs = _call(case, block, given, table)
    result = {f"out{i}": out.detach() for i, out in enumerate(outs)}
    grads = [above(out) for out in outs]
    above_by_name = {f"gradient of out{i}": grad for i, grad in enumerate(grads)}
    before |= memory_of(above_by_name)
    if leaves:
        chosen = range(len(outs)) if used is None else [used]
        frozen = "" if wants is None else f", all but {', '.join(leaves)} being frozen"
        assert all(outs[i].requires_grad for i in chosen), f"{case.name}: an output has no gradient{frozen}"
        roots, gradients = [outs[i] for i in chosen], [grads[i] for i in chosen]
        found = torch.autograd.grad(roots, list(leaves.values()), gradients, allow_unused=True)
        lost = [name for name, grad in zip(leaves, found, strict=True) if grad is None and used is None]
        assert not lost, f"{case.name}: no gradient reaches {', '.join(lost)}{frozen}"
        for (name, leaf), grad in zip(leaves.items(), found, strict=True):
            result[name] = torch.zeros_like(leaf) if grad is None else grad
    written = changed(before, watched | above_by_name)
    assert not written, f"{case.name}: the call changed its input {', '.join(written)}"
    return result


def _call(case: BlockCase, block: Block, given: dict[str, Tensor], table: Tensor | None) -> tuple[Tensor, ...]:
    if case.projection is not None:
        x, weight = given["x"], given["weight"]
        return tuple(block.norm_linear(x, weight, spec=case.projection, table=table, recompute=case.recompute))
    assert case.gate is not None
    a, u, weight = given["attention"], given["u"], given["weight"]
    linear = block.gated_linear(a, u, weight, given.get("residual"), spec=case.gate, recompute=case.recompute)
    return linear, block.gated(a, u, spec=case.gate)


@lru_cache(maxsize=256)
def _known(case: BlockCase, impl: BlockImpl, dtype: torch.dtype, seed: int, device: str, used: int | None) -> dict[str, Tensor]:  # fmt: skip  # noqa: E501
    return outcome(case, named(impl), dtype, seed=seed, device=device, used=used)


def judge(actual: dict[str, Tensor], case: BlockCase, dtype: torch.dtype, device: str, used: int | None = None) -> None:
    """Every tensor against float64; the yardstick is the worst of three draws of impl="eager"."""
    first = _known(case, "reference", torch.float64, 0, device, used)
    for name, got in actual.items():
        true = first[name]
        assert got.shape == true.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(true.shape)}"
        assert got.dtype == dtype, f"{name}: dtype {got.dtype}, expected {dtype}"
    errors = {name: row_error(got, first[name]) for name, got in actual.items()}
    allowed: dict[str, float] = {}
    wrong: list[str] = []
    for draw in range(3):
        truth = _known(case, "reference", torch.float64, 1000 * draw, device, used)
        plain = _known(case, "eager", dtype, 1000 * draw, device, used)
        for name, true in truth.items():
            factor = FORWARD_FACTOR if name.startswith("out") else BACKWARD_FACTOR
            rounding = float(true.abs().max()) * torch.finfo(dtype).eps / 2 if true.numel() else 0.0
            error = max(row_error(plain[name], true), rounding)
            allowed[name] = max(allowed.get(name, 0.0), factor * error)
        wrong = [
            f"{name}: error {errors[name]:.3e}, allowed {allowed[name]:.3e}"
            for name in errors
            if not errors[name] <= allowed[name]
        ]
        if not wrong:
            return
    raise AssertionError(f"{case.name} in {dtype} against float64: {'; '.join(wrong)}")


# ------------------------------------------------------------------------------------------------ checks


def check(block: Block, case: BlockCase, dtype: torch.dtype, device: str = "cpu") -> None:
    """Every output and gradient of one case."""
    judge(outcome(case, block, dtype, device=device), case, dtype, device)


def check_frozen(block: Block, case: BlockCase, dtype: torch.dtype, device: str = "cpu") -> None:
    """Gradients reach whichever inputs want one, the others being frozen; and none is needed."""
    for name in inputs(case, dtype, 0, device):
        used = None if name in ("x", "attention", "u") or case.gate is None else 0  # `gated` has no weight
        judge(outcome(case, block, dtype, device=device, wants=(name,), used=used), case, dtype, device, used)
    with torch.no_grad():
        judge(outcome(case, block, dtype, device=device, wants=()), case, dtype, device)


def check_unused(block: Block, case: BlockCase, dtype: torch.dtype, device: str = "cpu") -> None:
    """An output that nothing is derived from counts as gradient zero."""
    for used in range(len(case.projection.widths) if case.projection is not None else 2):
        judge(outcome(case, block, dtype, device=device, used=used), case, dtype, device, used)


def check_same_bits(block: Block, case: BlockCase, dtype: torch.dtype, device: str = "cpu") -> None:
    """Neither another run nor a flag of RecomputeSpec changes a bit."""
    kept = outcome(replace(case, recompute=RecomputeSpec()), block, dtype, device=device)
    for flag in (None, *(item.name for item in fields(RecomputeSpec))):
        recompute = RecomputeSpec() if flag is None else RecomputeSpec(**{flag: True})
        again = outcome(replace(case, recompute=recompute), block, dtype, device=device)
        differ = [name for name, x in kept.items() if not torch.equal(x, again[name])]
        assert not differ, f"{case.name}: {flag or 'another run'} changed bits of {', '.join(differ)}"


_CALLED = {
    "frozen": (check_frozen, ("layer-all", "rms-plain", "gate-layer-silu", "gate-rms-none-per-head")),
    "unused": (check_unused, ("layer-silu-u", "rms-silu-all", "gate-rms-sigmoid")),
    "same-bits": (check_same_bits, ("layer-all", "rms-silu-all", "gate-layer-silu-per-head", "gate-rms-sigmoid")),
}


def conformance(quirks: BlockQuirks) -> list[BlockCheck]:
    """All checks for an implementation; those that the quirks leave out say so in `skipped`."""
    listed = [*projection_cases(), *gate_cases()]
    checks = [BlockCheck(name="core", run=lambda block: _check_core(listed, quirks))]

    def add(name: str, case: BlockCase, dtype: torch.dtype, call: Callable[..., None], quirk: str | None) -> None:
        run = lambda block: call(block, case, dtype, quirks.device)  # noqa: E731
        checks.append(BlockCheck(name=name, run=run, skipped=quirks.refuses(case) or quirk))

    for case in listed:
        for dtype in quirks.dtypes:
            add(f"{case.name}-{str(dtype).removeprefix('torch.')}", case, dtype, check, None)
    for kind, (call, names) in _CALLED.items():
        quirk = None if quirks.deterministic or call is not check_same_bits else "quirk: not repeatable bit for bit"
        for case in listed:
            if case.name in names:
                add(f"{kind}-{case.name}", case, quirks.dtypes[0], call, quirk)
    return checks


def _check_core(listed: list[BlockCase], quirks: BlockQuirks) -> None:
    for part in ("projection", "gate"):
        reasons = [quirks.refuses(case) for case in listed if case.core and getattr(case, part) is not None]
        assert None in reasons, f"every core case of the {part} is refused ({reasons[0]}): such a run proves nothing"
