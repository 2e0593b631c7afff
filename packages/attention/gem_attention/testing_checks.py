"""How one case is run and judged; public through gem_attention.testing, whose docstring tells the rule for errors.

Besides the values: a call must leave its inputs alone, must give gradients to whichever of its inputs want one, and
must not keep from one call what the next one changes (the spec over a layout, the layout under a spec).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gem_attention import reference
from gem_attention.interface import Attention, MaskSpec
from gem_attention.testing_cases import RAGGED, Case, Inputs, make_inputs

FORWARD_FACTOR = 2.0
BACKWARD_FACTOR = 3.0
LEAVES = ("q", "k", "v", "position_table", "time_table")


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """What an implementation does not claim, as data; what it claims is tested in full.

    dtypes, device    what to run on
    head_dims         replaces the suite's small head dims by each of these (kernels have their own); cases of unequal
                      dims run where both are among them, else they are listed as skipped
    refuses           a case for which this returns a reason is listed as skipped, with that reason
    backward, deterministic, isolates_nan   False: not promised; these checks are listed as skipped
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    device: str = "cpu"
    head_dims: tuple[int, ...] = ()
    refuses: Callable[[Case], str | None] = field(default=lambda case: None)
    backward: bool = True
    deterministic: bool = True
    isolates_nan: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """The output and the gradients of one call, by name."""

    out: Tensor
    grads: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        return {"out": self.out, **self.grads}


def run_case(
    attention: Attention, case: Case, inputs: Inputs, *, backward: bool = True, wants: Collection[str] = LEAVES
) -> Result:
    """One call. wants: names of the inputs that want a gradient; the others are frozen. Reads of the case its spec."""
    given = {name: tensor.detach() for name in LEAVES if (tensor := getattr(inputs, name)) is not None}
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items() if name in wants}
    out = attention(
        given["q"],
        given["k"],
        given["v"],
        spec=case.spec,
        layout=inputs.layout,
        position_table=given.get("position_table"),
        time_table=given.get("time_table"),
        divisor=inputs.divisor,
    )
    expected = inputs.grad_out.shape
    assert out.shape == expected, f"{case.name}: the output has shape {tuple(out.shape)}, expected {tuple(expected)}"
    if not backward or not leaves:
        return Result(out=out.detach(), grads={})
    frozen = "" if len(leaves) == len(given) else f", all but {', '.join(leaves)} being frozen"
    assert out.requires_grad, f"{case.name}: the output has no gradient{frozen}"
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.grad_out, allow_unused=True)
    named = dict(zip(leaves, grads, strict=True))
    lost = [name for name, grad in named.items() if grad is None]
    assert not lost, f"{case.name}: no gradient reaches {', '.join(lost)}{frozen}"
    return Result(out=out.detach(), grads=named)


def row_error(actual: Tensor, truth: Tensor) -> float:
    """Root mean square error of the worst row (last dim), in float64; 0 for empty tensors, inf for NaN or infinity."""
    if truth.numel() == 0:
        return 0.0
    gap = (actual.to(torch.float64) - truth).square().mean(dim=-1).sqrt()
    return float(gap.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def plain_attention(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """The yardstick: the formula as written, sample by sample, every step in q's dtype."""
    return reference.attention_in(q.dtype, q, k, v, **more)


@lru_cache(maxsize=2048)
def _plain_errors(case: Case, dtype: torch.dtype, device: str, backward: bool) -> dict[str, float]:
    narrow = torch.float32 if dtype == torch.float64 else dtype
    plain = run_case(plain_attention, case, make_inputs(case, narrow, device), backward=backward)
    ratio = torch.finfo(dtype).eps / torch.finfo(narrow).eps
    errors = {}
    for name, true in _true_result(case, device, backward).tensors().items():
        largest = float(true.abs().max()) if true.numel() else 0.0
        errors[name] = max(row_error(plain.tensors()[name], true) * ratio, largest * torch.finfo(dtype).eps / 2)
    return errors


def plain_errors(case: Case, dtype: torch.dtype, quirks: Quirks) -> dict[str, float]:
    """By tensor ("out", "q", ...): how wrong plain PyTorch is in dtype, on the draw that case.seed names."""
    return _plain_errors(case, dtype, quirks.device, quirks.backward)


@lru_cache(maxsize=64)
def _true_result(case: Case, device: str, backward: bool) -> Result:
    return run_case(reference.attention, case, make_inputs(case, torch.float64, device), backward=backward)


def true_result(case: Case, quirks: Quirks) -> Result:
    """By the reference, in float64."""
    return _true_result(case, quirks.device, quirks.backward)


def judge(actual: Result, case: Case, dtype: torch.dtype, quirks: Quirks, inputs: Inputs) -> None:
    """Every tensor of the result against float64."""
    errors = {}
    true = true_result(case, quirks).tensors()
    for name, got in actual.tensors().items():
        expected = dtype if name == "out" else getattr(inputs, name).dtype
        assert got.shape == true[name].shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(true[name].shape)}"
        assert got.dtype == expected, f"{name}: dtype {got.dtype}, expected {expected}"
        errors[name] = row_error(got, true[name])
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


def memory_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the bytes behind each tensor, those between its rows included."""
    bytes_of = (
        (name, torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()))  # type: ignore[call-overload]
        for name, x in tensors.items()
    )
    return {name: raw.clone() for name, raw in bytes_of}


def changed(before: dict[str, Tensor], tensors: dict[str, Tensor]) -> list[str]:
    """Names of the tensors whose memory is no longer what memory_of saw."""
    after = memory_of(tensors)
    return [name for name, raw in before.items() if not torch.equal(raw, after[name])]


# ------------------------------------------------------------------------------------------------ checks


def check_against_float64(attention: Attention, case: Case, dtype: torch.dtype, quirks: Quirks) -> None:
    """Output and every gradient of one case; no input is changed."""
    inputs = make_inputs(case, dtype, quirks.device)
    before = memory_of(inputs.tensors())
    actual = run_case(attention, case, inputs, backward=quirks.backward)
    written = changed(before, inputs.tensors())
    assert not written, f"{case.name}: the call changed its input {', '.join(written)}"
    assert actual.out.is_contiguous(), f"{case.name}: the output is not contiguous"
    judge(actual, case, dtype, quirks, inputs)


def check_isolation(attention: Attention, case: Case, dtype: torch.dtype, quirks: Quirks) -> None:
    """NaN in every second set of keys and values, and in the queries of every other sample that has its own, must not
    reach the results of the samples left clean.

    Example: kv_index (0, 0, 2, 2, 2) with queries of their own: NaN in the keys and values of 1 and 2 and in the
    queries of all samples but 0, which is compared; with broadcast queries, samples 0 and 1 are.
    """
    inputs = make_inputs(case, dtype, quirks.device)
    layout = inputs.layout
    clean = run_case(attention, case, inputs, backward=False).out
    q, k, v = inputs.q.clone(), inputs.k.clone(), inputs.v.clone()
    k_offsets = layout.k_offsets.tolist()
    q_offsets = None if layout.q_offsets is None else layout.q_offsets.tolist()
    kv_rows = list(range(layout.batch_size)) if layout.kv_index is None else layout.kv_index.tolist()
    clean_kv = sorted(set(kv_rows))[::2]
    for row in range(len(k_offsets) - 1):
        if row not in clean_kv:
            k[k_offsets[row] : k_offsets[row + 1]] = float("nan")
            v[k_offsets[row] : k_offsets[row + 1]] = float("nan")
    keep = torch.zeros(clean.shape[0], dtype=torch.bool, device=clean.device)
    for b, row in enumerate(kv_rows):
        if q_offsets is None:  # out is (batch, ...), and the queries are everybody's
            keep[b] = row in clean_kv
        elif row in clean_kv and row not in kv_rows[:b]:
            keep[q_offsets[b] : q_offsets[b + 1]] = True
        else:
            q[q_offsets[b] : q_offsets[b + 1]] = float("nan")
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


def layers_of(case: Case) -> list[Case]:
    """Cases that may share the layout of `case` (self, with targets, context and times), as layers of a model do."""
    spec, causal = case.spec, MaskSpec(causal=True)
    assert spec.bias is not None
    assert spec.bias.time is not None
    other_buckets = replace(spec.bias, time=replace(spec.bias.time, step=spec.bias.time.step * 3))
    layers = {
        "causal": replace(spec, mask=causal, bias=None),
        "window": replace(spec, mask=replace(causal, window=5), bias=None),
        "block": replace(spec, mask=MaskSpec(block=6), bias=None),
        "targets": replace(spec, mask=replace(causal, targets=True), bias=None),
        "all": replace(spec, bias=None),
        "bias": spec,
        "other-buckets": replace(spec, bias=other_buckets),
        "softmax": replace(spec, activation="softmax", divisor=1.0),
    }
    return [replace(case, name=f"{case.name}+{name}", spec=layer) for name, layer in layers.items()]


def check_layers(attention: Attention, case: Case, dtype: torch.dtype, quirks: Quirks) -> None:
    """One layout serves layers of several specs, each after each other."""
    layers = [layer for layer in layers_of(case) if left_out(layer, quirks) is None]
    layout = make_inputs(case, dtype, quirks.device).layout
    for layer in (*layers, *reversed(layers[:-1])):
        inputs = replace(make_inputs(layer, dtype, quirks.device), layout=layout)
        judge(run_case(attention, layer, inputs, backward=quirks.backward), layer, dtype, quirks, inputs)


def alike(case: Case) -> list[Case]:
    """Cases with the spec, rows, samples and longest sample of `case`, and other offsets, counts or times."""

    def turned(values: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if values is None else values[::-1]

    turned_targets = replace(case, num_targets=turned(case.num_targets), num_context=turned(case.num_context))
    both = replace(turned_targets, q_lengths=case.q_lengths[::-1], k_lengths=turned(case.k_lengths))
    none = replace(case, num_targets=case.num_targets and (0,) * len(case.num_targets))
    return [
        case,
        replace(both, name=f"{case.name}+turned"),
        replace(none, seed=case.seed + 1, name=f"{case.name}+seed"),
    ]


def check_alike(attention: Attention, case: Case, dtype: torch.dtype, quirks: Quirks) -> None:
    """Batches of equal sizes and other offsets, one after another: nothing may be kept by sizes."""
    for other in alike(case):
        check_against_float64(attention, other, dtype, quirks)


def check_frozen(attention: Attention, case: Case, dtype: torch.dtype, quirks: Quirks) -> None:
    """Gradients reach whichever inputs want one, the others being frozen; and none is needed."""
    inputs = make_inputs(case, dtype, quirks.device)
    for name in LEAVES:
        if getattr(inputs, name) is not None:
            alone = run_case(attention, case, inputs, wants=(name,))
            judge(alone, case, dtype, quirks, inputs)
    with torch.no_grad():
        judge(run_case(attention, case, inputs, wants=()), case, dtype, quirks, inputs)


def sized(cases: Iterable[Case], quirks: Quirks) -> list[Case]:
    """Cases with the implementation's head dims."""
    made = []
    for case in cases:
        if not quirks.head_dims:
            made.append(case)
        for dim in quirks.head_dims:
            qk_dim = dim * case.qk_dim // case.v_dim  # keeps the cases whose dims differ
            made.append(replace(case, name=f"{case.name}-d{dim}", qk_dim=qk_dim, v_dim=dim))
    return made


def left_out(case: Case, quirks: Quirks) -> str | None:
    """Why the quirks leave out a case that `sized` made; None: it runs."""
    if quirks.head_dims and case.qk_dim not in quirks.head_dims:
        return "quirk: q and v of unequal dims"
    return quirks.refuses(case)


def is_ragged_self(case: Case) -> bool:
    """The self-attention that check_isolation is for."""
    return case.spec.query == "self" and case.q_lengths == RAGGED and not case.strided


def has_other_queries(case: Case) -> bool:
    """The usual cases of cross, broadcast, tail and shared keys that check_isolation and check_repeatable are for."""
    return case.spec.query != "self" and case.spec.activation in ("silu", "softmax")
