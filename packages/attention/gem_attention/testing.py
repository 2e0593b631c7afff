"""The conformance suite that any implementation can run, here or in another repository; needs torch only.

    from gem_attention.testing import Quirks, conformance
    @pytest.mark.parametrize("check", conformance(Quirks(dtypes=(torch.float32,))), ids=str)
    def test_conforms(check):
        check(my_attention)              # a callable as interface.Attention describes

The rule for errors has no magic number: against float64, an implementation may be at most 2 times (forward) or 3 times
(backward) as wrong as plain PyTorch in the same dtype. How wrong a tensor is: the root mean square error of its worst
row (one token and head; single entries are a matter of luck, means over the tensor hide a wrong row). Plain PyTorch is
the reference's formula with every step in that dtype; so that a lucky yardstick fails nobody, its error is the largest
of three draws of the inputs, and at least the rounding of the tensor's largest entry to the dtype. For float64 itself
there is no better truth: the yardstick is the error of float32 plain PyTorch, scaled by the ratio of the two
roundings, 2^-29.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gem_attention import reference
from gem_attention.api import make_layout
from gem_attention.interface import Activation, Attention, AttentionSpec, BiasSpec, Layout, MaskSpec, TimeBuckets

FORWARD_FACTOR = 2.0
BACKWARD_FACTOR = 3.0
ACTIVATIONS: tuple[Activation, ...] = (
    "softmax", "silu", "gelu", "gelu_tanh", "gelu_poly", "relu", "relu2", "identity",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One spec on one batch. k_lengths default to q_lengths (self); for broadcast, q_lengths is (S,)."""

    name: str
    spec: AttentionSpec
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...] | None = None
    num_targets: tuple[int, ...] | None = None
    num_context: tuple[int, ...] | None = None
    kv_index: tuple[int, ...] | None = None
    heads: int = 2
    kv_heads: int = 2
    qk_dim: int = 16
    v_dim: int = 16
    strided: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Tensors of a case and the gradient that comes from above."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    position_table: Tensor | None
    time_table: Tensor | None
    divisor: Tensor | None
    grad_out: Tensor


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """What an implementation does not claim, as data; what it claims is tested in full.

    dtypes, device    what to run on
    head_dims         replaces the suite's small head dims by each of these (kernels have their own)
    refuses           a case for which this returns a reason is not run; the suite lists it as refused
    backward, deterministic, isolates_nan   False: not promised, not tested
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    device: str = "cpu"
    head_dims: tuple[int, ...] = ()
    refuses: Callable[[Case], str | None] = field(default=lambda case: None)
    backward: bool = True
    deterministic: bool = True
    isolates_nan: bool = True


@dataclass(frozen=True, kw_only=True)
class Check:
    """One named check; call it with the implementation. AssertionError says what went wrong."""

    name: str
    run: Callable[[Attention], None]

    def __call__(self, attention: Attention) -> None:
        self.run(attention)

    def __str__(self) -> str:
        return self.name


# ------------------------------------------------------------------------------------------------ inputs

RAGGED = (7, 0, 33, 1, 18, 2, 5)
UNIFORM = (16, 16, 16)
EDGES = (63, 64, 65, 127, 128, 129)
EMPTY: tuple[int, ...] = ()
ZEROS = (0, 0, 0)


def offsets_of(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    """Example: (2, 0, 3) -> [0, 2, 2, 5]."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=device)


def layout_of(case: Case, device: str = "cpu") -> Layout:
    def ints(values: tuple[int, ...] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int64, device=device)

    query = case.spec.query
    keys = case.q_lengths if case.k_lengths is None else case.k_lengths
    generator = torch.Generator().manual_seed(case.seed + 1)
    times = torch.randint(0, 100_000, (sum(keys),), generator=generator).sort().values.to(device)
    return make_layout(
        q_offsets=None if query == "broadcast" else offsets_of(case.q_lengths, device),
        k_offsets=None if query == "self" else offsets_of(keys, device),
        tail=query == "tail",
        num_targets=ints(case.num_targets),
        num_context=ints(case.num_context),
        kv_index=ints(case.kv_index),
        timestamps=times if case.spec.bias is not None and case.spec.bias.time is not None else None,
    )


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Normal values times 0.5, exact in float16 and bfloat16 alike, so that each dtype sees the same numbers."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, std: float = 0.5) -> Tensor:
        x = (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)
        x = x.to(torch.float16).to(dtype).to(device)
        if case.strided and len(shape) == 3:
            x = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)  # rows are the innermost dim in memory
        return x

    layout = layout_of(case, device)
    q_rows = case.q_lengths[0] if case.spec.query == "broadcast" else layout.total_q
    q = normal(q_rows, case.heads, case.qk_dim)
    k = normal(layout.total_k, case.kv_heads, case.qk_dim)
    v = normal(layout.total_k, case.kv_heads, case.v_dim)
    bias = case.spec.bias
    positions = bias.max_positions if bias is not None else 0
    position_table = normal(1, 2 * positions - 1, std=0.3) if positions else None
    time_table = normal(case.heads, bias.time.count, std=0.3) if bias is not None and bias.time is not None else None
    shape: tuple[int, ...] = (q_rows, case.heads, case.v_dim)
    out_rows = q_rows
    if case.spec.query == "broadcast":
        shape, out_rows = (layout.batch_size, *shape), layout.batch_size * q_rows
    divisor = None
    if case.spec.divisor == "per_token":
        divisor = (torch.rand(out_rows, generator=generator) * 20 + 1).to(torch.bfloat16).float().to(device)
    grad_out = normal(*shape)
    return Inputs(
        q=q, k=k, v=v, layout=layout, position_table=position_table, time_table=time_table, divisor=divisor,
        grad_out=grad_out,
    )  # fmt: skip


def _masks() -> dict[str, MaskSpec]:
    return {
        "none": MaskSpec(),
        "causal": MaskSpec(causal=True),
        "window": MaskSpec(window=4),
        "causal-window": MaskSpec(causal=True, window=5),
        "causal-window-full": MaskSpec(causal=True, window=3, min_full_rows=2),
        "targets": MaskSpec(causal=True, targets=True),
        "groups": MaskSpec(causal=True, targets=True, target_group_size=2, semantics="nvidia"),
        "context": MaskSpec(causal=True, context=True),
        "context-targets": MaskSpec(causal=True, context=True, targets=True),
        "window-targets-meta": MaskSpec(causal=True, targets=True, window=3, semantics="meta"),
        "window-targets-nvidia": MaskSpec(causal=True, targets=True, window=3, semantics="nvidia"),
        "all-meta": MaskSpec(
            causal=True, targets=True, context=True, window=3, min_full_rows=2, semantics="meta"
        ),
        "all-nvidia": MaskSpec(
            causal=True, targets=True, context=True, window=4, min_full_rows=1, target_group_size=2, semantics="nvidia"
        ),
        "noncausal-targets": MaskSpec(targets=True, context=True, window=6, semantics="meta"),
        "block": MaskSpec(block=64),
    }  # fmt: skip


def cases() -> list[Case]:
    """The suite's cases: each mask, activation, bias, query kind and shape of batch, not their whole product."""
    result: list[Case] = []

    def add(name: str, lengths: tuple[int, ...], spec: AttentionSpec, **more: object) -> None:
        targets = tuple((n + 2) // 3 for n in lengths) if spec.mask.targets else None
        context = tuple(n // 4 for n in lengths) if spec.mask.context else None
        case = Case(name=name, spec=spec, q_lengths=lengths, num_targets=targets, num_context=context, seed=len(result))
        result.append(replace(case, **more))  # type: ignore[arg-type]

    def spec_of(activation: Activation = "silu", **more: object) -> AttentionSpec:
        divisor = 1.0 if activation == "softmax" else 13.0
        return replace(AttentionSpec(activation=activation, scale=0.25, divisor=divisor), **more)  # type: ignore[arg-type]

    causal = MaskSpec(causal=True)
    for name, mask in _masks().items():
        lengths = EDGES if name == "block" else RAGGED
        add(f"silu-{name}", lengths, spec_of(mask=mask))
        add(f"softmax-{name}", lengths, spec_of("softmax", mask=mask))
    for activation in ACTIVATIONS:
        add(f"{activation}-uniform", UNIFORM, spec_of(activation, mask=causal))
        add(f"{activation}-cross", (3, 0, 9, 5), spec_of(activation, query="cross"), k_lengths=(12, 4, 0, 7))
        add(f"{activation}-broadcast", (6,), spec_of(activation, query="broadcast"), k_lengths=(12, 0, 1, 30))
    for activation in ("silu", "softmax"):
        add(f"{activation}-edges", EDGES, spec_of(activation, mask=causal))
        add(f"{activation}-gqa", RAGGED, spec_of(activation, mask=causal), heads=4, kv_heads=2)
        add(f"{activation}-mqa-cross", (3, 8, 2), spec_of(activation, query="cross"), k_lengths=(9, 4, 20), heads=4,
            kv_heads=1)  # fmt: skip
        add(f"{activation}-unequal-dims", RAGGED, spec_of(activation, mask=causal), qk_dim=32, v_dim=16)
        add(f"{activation}-strided", RAGGED, spec_of(activation, mask=causal), strided=True)
        add(f"{activation}-zeros", ZEROS, spec_of(activation, mask=causal))
        add(f"{activation}-empty", EMPTY, spec_of(activation, mask=causal))
        add(f"{activation}-tail", (3, 0, 5, 1), spec_of(activation, query="tail", mask=causal), k_lengths=(9, 4, 5, 70))
        add(f"{activation}-tail-window-targets", (6, 3, 5), spec_of(
            activation, query="tail", mask=_masks()["window-targets-meta"]
        ), k_lengths=(12, 3, 40), num_targets=(2, 1, 5))  # fmt: skip
        shared = {"k_lengths": (9, 4, 20), "kv_index": (0, 0, 2, 2, 2)}
        add(f"{activation}-shared-cross", (3, 8, 2, 0, 1), spec_of(activation, query="cross"), **shared)
        add(f"{activation}-shared-broadcast", (4,), spec_of(activation, query="broadcast"), **shared)
        buckets = TimeBuckets(count=24)
        for where in ("inside_scale", "outside_scale"):
            both = BiasSpec(where=where, max_positions=40, time=buckets)
            add(f"{activation}-bias-{where}", RAGGED, spec_of(activation, mask=causal, bias=both))
        only = BiasSpec(where="outside_scale", max_positions=33)
        add(f"{activation}-position-bias", RAGGED, spec_of(activation, bias=only, mask=_masks()["all-meta"]))
        sqrt = BiasSpec(where="inside_scale", time=TimeBuckets(function="sqrt", step=7.75, count=40))
        add(f"{activation}-time-bias", RAGGED, spec_of(activation, mask=causal, bias=sqrt), heads=4, kv_heads=2)
        add(f"{activation}-tail-bias", (3, 0, 5, 1), spec_of(activation, query="tail", mask=causal, bias=BiasSpec(
            where="outside_scale", max_positions=80, time=buckets
        )), k_lengths=(9, 4, 5, 70))  # fmt: skip
    add("silu-per-token", RAGGED, spec_of(mask=causal, divisor="per_token"))
    add("gelu-per-token-broadcast", (4,), spec_of("gelu", query="broadcast", divisor="per_token"), k_lengths=(5, 0, 9))
    far = BiasSpec(where="outside_scale", max_positions=130, time=TimeBuckets(count=24))
    add("silu-bias-edges", EDGES, spec_of(mask=MaskSpec(causal=True, targets=True), bias=far))
    return result


# ------------------------------------------------------------------------------------------------ running


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """The output and the gradients of one call, by name."""

    out: Tensor
    grads: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        return {"out": self.out, **self.grads}


def run_case(attention: Attention, case: Case, inputs: Inputs, *, backward: bool = True) -> Result:
    leaves = {
        name: tensor.detach().requires_grad_()
        for name in ("q", "k", "v", "position_table", "time_table")
        if (tensor := getattr(inputs, name)) is not None
    }
    out = attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        spec=case.spec,
        layout=inputs.layout,
        position_table=leaves.get("position_table"),
        time_table=leaves.get("time_table"),
        divisor=inputs.divisor,
    )
    if not backward:
        return Result(out=out.detach(), grads={})
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.grad_out)
    return Result(out=out.detach(), grads=dict(zip(leaves, grads, strict=True)))


def row_error(actual: Tensor, truth: Tensor) -> float:
    """Root mean square error of the worst row (last dim), in float64; 0 for empty tensors, inf for NaN or infinity."""
    if truth.numel() == 0:
        return 0.0
    gap = (actual.to(torch.float64) - truth).square().mean(dim=-1).sqrt()
    return float(gap.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def plain_attention(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """The yardstick: the formula as written, sample by sample, every step in q's dtype."""
    return reference.attention_in(q.dtype, q, k, v, **more)


def plain_errors(case: Case, dtype: torch.dtype, quirks: Quirks) -> dict[str, float]:
    """By tensor ("out", "q", ...): how wrong plain PyTorch is in dtype, on the draw that case.seed names."""
    narrow = torch.float32 if dtype == torch.float64 else dtype
    plain = run_case(plain_attention, case, make_inputs(case, narrow, quirks.device), backward=quirks.backward)
    ratio = torch.finfo(dtype).eps / torch.finfo(narrow).eps
    errors = {}
    for name, true in true_result(case, quirks).tensors().items():
        largest = float(true.abs().max()) if true.numel() else 0.0
        errors[name] = max(row_error(plain.tensors()[name], true) * ratio, largest * torch.finfo(dtype).eps / 2)
    return errors


def true_result(case: Case, quirks: Quirks) -> Result:
    inputs = make_inputs(case, torch.float64, quirks.device)
    return run_case(reference.attention, case, inputs, backward=quirks.backward)


def check_against_float64(attention: Attention, case: Case, dtype: torch.dtype, quirks: Quirks) -> None:
    """Output and every gradient of one case."""
    inputs = make_inputs(case, dtype, quirks.device)
    actual = run_case(attention, case, inputs, backward=quirks.backward)
    assert actual.out.is_contiguous(), f"{case.name}: the output is not contiguous"
    errors = {}
    for name, true in true_result(case, quirks).tensors().items():
        got = actual.tensors()[name]
        assert got.shape == true.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(true.shape)}"
        assert got.dtype == dtype, f"{name}: dtype {got.dtype}, expected {dtype}"
        errors[name] = row_error(got, true)
    largest: dict[str, float] = {}
    for draw in range(3):  # more draws can only raise what is allowed, so they are made only when needed
        plain = plain_errors(replace(case, seed=case.seed + 1000 * draw), dtype, quirks)
        largest = {name: max(plain[name], largest.get(name, 0.0)) for name in plain}
        allowed = {name: (FORWARD_FACTOR if name == "out" else BACKWARD_FACTOR) * largest[name] for name in plain}
        wrong = [name for name in errors if not errors[name] <= allowed[name]]
        if not wrong:
            return
    listing = "; ".join(f"{name}: error {errors[name]:.3e}, allowed {allowed[name]:.3e}" for name in wrong)
    raise AssertionError(f"{case.name} in {dtype} against float64: {listing}")


def check_isolation(attention: Attention, case: Case, dtype: torch.dtype, quirks: Quirks) -> None:
    """NaN in the rows of every second sample must not reach the results of the others."""
    inputs = make_inputs(case, dtype, quirks.device)
    clean = run_case(attention, case, inputs, backward=False).out
    poisoned = [inputs.q.clone(), inputs.k.clone(), inputs.v.clone()]
    offsets = inputs.layout.k_offsets.tolist()
    keep = torch.zeros(clean.shape[0], dtype=torch.bool, device=clean.device)
    for b in range(inputs.layout.batch_size):
        rows = slice(offsets[b], offsets[b + 1])
        if b % 2:
            for tensor in poisoned:
                tensor[rows] = float("nan")
        else:
            keep[rows] = True
    q, k, v = poisoned
    out = run_case(attention, case, replace(inputs, q=q, k=k, v=v), backward=False).out
    assert torch.equal(out[keep], clean[keep]), f"{case.name}: NaN in one sample changed the result of another"


def check_repeatable(attention: Attention, case: Case, dtype: torch.dtype, quirks: Quirks) -> None:
    """Two runs give the same bits."""
    inputs = make_inputs(case, dtype, quirks.device)
    first = run_case(attention, case, inputs, backward=quirks.backward)
    second = run_case(attention, case, inputs, backward=quirks.backward)
    assert torch.equal(first.out, second.out), f"{case.name}: two runs gave different outputs"
    for name, grad in first.grads.items():
        assert torch.equal(grad, second.grads[name]), f"{case.name}: two runs gave different gradients of {name}"


def suite_cases(quirks: Quirks) -> list[Case]:
    """Cases with the implementation's head dims, without those it refuses."""
    sized = []
    for case in cases():
        if not quirks.head_dims:
            sized.append(case)
        for dim in quirks.head_dims:
            qk_dim = dim * case.qk_dim // case.v_dim  # keeps the cases whose dims differ
            sized.append(replace(case, name=f"{case.name}-d{dim}", qk_dim=qk_dim, v_dim=dim))
    return [case for case in sized if quirks.refuses(case) is None]


def conformance(quirks: Quirks) -> list[Check]:
    """All checks for an implementation."""
    checks: list[Check] = []

    def add(kind: str, case: Case, dtype: torch.dtype, check: Callable[..., None]) -> None:
        name = f"{kind}-{case.name}-{str(dtype).removeprefix('torch.')}"
        checks.append(Check(name=name, run=lambda attention: check(attention, case, dtype, quirks)))

    for case in suite_cases(quirks):
        for dtype in quirks.dtypes:
            add("float64", case, dtype, check_against_float64)
        isolated = case.spec.query == "self" and case.q_lengths == RAGGED and not case.strided
        if quirks.isolates_nan and isolated:
            add("isolation", case, quirks.dtypes[0], check_isolation)
        if quirks.deterministic and case.q_lengths in (EDGES, RAGGED):
            add("repeatable", case, quirks.dtypes[0], check_repeatable)
    return checks
