"""Faults that the suites must see: each plants one in the definition and names the check that fails."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import SkipTest, mock

import pytest
import torch
from gem_attention import block_api, block_testing, reference
from gem_attention.block_testing import BlockQuirks, named
from gem_attention.testing import Quirks, cases, conformance, summary
from torch import Tensor

CHECKS = {str(check): check for check in conformance(Quirks(dtypes=(torch.float32, torch.bfloat16)))}
BLOCK_CHECKS = {str(check): check for check in block_testing.conformance(BlockQuirks())}
FAULTS = []  # (fault, name of the check without dtype)


def seen_by(*names):
    def listed(fault):
        FAULTS.extend(pytest.param(fault, name, id=f"{fault.__name__}-{name}") for name in names)
        return fault

    return listed


def attention_with(fault):
    """The definition, but the fault first changes the call. call.kept: what it remembers; call.patches: while it runs;
    call.after: what becomes of the output."""
    kept = {}

    def attention(q, k, v, **more):
        call = SimpleNamespace(q=q, k=k, v=v, kept=kept, patches=[], after=lambda out: out, **more)
        fault(call)
        given = {name: x for name, x in vars(call).items() if name not in ("kept", "patches", "after")}
        with ExitStack() as stack:
            for patch in call.patches:
                stack.enter_context(patch)
            return call.after(reference.attention(**given))

    return attention


def masked(spec, **changes):
    return replace(spec, mask=replace(spec.mask, **changes))


def rows_of(layout):
    return layout.k_offsets.diff()


def packed(x: Tensor) -> Tensor:
    """What lies in memory from x's first element on, taken for packed rows."""
    strides = torch.empty(x.shape, device="meta").stride()
    return torch.as_strided(x, x.shape, strides, x.storage_offset()) if x.stride(-1) == 1 and x.numel() else x


class Backward(torch.autograd.Function):
    """The identity, whose backward applies `change` to the gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


@seen_by("float64-silu-fused", "float64-softmax-fused-broadcast")
def takes_a_last_stride_of_1_for_packed_rows(call):
    call.q, call.k, call.v = (packed(x) for x in (call.q, call.k, call.v))


@seen_by("float64-silu-fused")
def takes_the_gradient_for_packed(call):
    call.after = lambda out: Backward.apply(out, packed)


@seen_by("float64-silu-summed", "float64-softmax-summed")
def takes_no_expanded_gradient(call):
    call.after = lambda out: Backward.apply(out, lambda g: g if all(g.stride()) else torch.zeros_like(g))


@seen_by("float64-silu-window-16")
def has_no_windows_from_16(call):
    if call.spec.mask.window >= 16:
        call.spec = masked(call.spec, window=0, min_full_rows=0)


@seen_by("float64-softmax-window-100", "float64-softmax-window-200")
def has_no_windows_from_64(call):
    if call.spec.mask.window >= 64:
        call.spec = masked(call.spec, window=0)


@seen_by("float64-softmax-block-5", "float64-silu-block-16", "float64-silu-block-100")
def has_blocks_of_64_only(call):
    call.spec = masked(call.spec, block=64) if call.spec.mask.block else call.spec


@seen_by("float64-silu-noncausal-targets-alone")
def has_one_target_at_least(call):
    if call.layout.num_targets is not None:
        room = rows_of(call.layout) - (0 if call.layout.num_context is None else call.layout.num_context)
        least = room.clamp(max=1)
        call.layout = replace(call.layout, num_targets=call.layout.num_targets.maximum(least))


@seen_by("float64-softmax-all-meta-alone")
def has_no_more_context_than_a_quarter(call):
    if call.layout.num_context is not None:
        few = call.layout.num_context.minimum(rows_of(call.layout) // 4)
        call.layout = replace(call.layout, num_context=few)


@seen_by("float64-softmax-unix-seconds", "float64-silu-unix-milliseconds")
def keeps_times_in_float32(call):
    if call.layout.timestamps is not None:
        call.layout = replace(call.layout, timestamps=call.layout.timestamps.float().long())


@seen_by("float64-softmax-unix-seconds")
def takes_no_absolute_gap(call):
    whole = reference.time_buckets  # times are sorted, so gaps below 0 are above the second diagonal
    call.patches.append(mock.patch.object(reference, "time_buckets", lambda *given: whole(*given).tril(1)))


@seen_by("float64-silu-table-a-head")
def uses_the_first_row_of_the_position_table(call):
    call.position_table = None if call.position_table is None else call.position_table[:1]


@seen_by("float64-softmax-table-two-heads", "float64-silu-table-tail")
def maps_heads_to_tables_round_robin(call):
    for name in ("position_table", "time_table"):
        if (table := getattr(call, name)) is not None:
            setattr(call, name, table[torch.arange(call.q.shape[1]) % table.shape[0]])


@seen_by("float64-silu-table-one")
def wants_a_row_of_the_time_table_a_head(call):
    if call.time_table is not None:
        call.time_table = torch.cat([call.time_table, torch.zeros_like(call.time_table)])[: call.q.shape[1]]


@seen_by("float64-softmax-table-wide-bfloat16", "float64-silu-narrow-divisor-bfloat16")
def wants_tables_of_the_inputs_dtype_and_a_float32_divisor(call):
    for table in (call.position_table, call.time_table):
        assert table is None or table.dtype == call.q.dtype
    assert call.divisor is None or call.divisor.dtype == torch.float32


@seen_by("layers-silu-layers")
def keeps_the_mask_with_the_layout(call):
    mask = call.kept.setdefault(id(call.layout), (call.spec.mask, call.layout))[0]
    call.spec = replace(call.spec, mask=mask)


@seen_by("layers-silu-layers")
def keeps_the_buckets_with_the_layout(call):
    if call.spec.bias is not None:
        bias = call.kept.setdefault(id(call.layout), (call.spec.bias, call.layout))[0]
        call.spec = replace(call.spec, bias=bias)


@seen_by("alike-silu-causal", "alike-softmax-all-meta", "alike-silu-bias-outside_scale", "alike-softmax-cross")
def keeps_the_layout_by_sizes(call):
    sizes = call.layout.batch_size, call.layout.total_q, call.layout.total_k, call.layout.max_k_len
    call.layout = call.kept.setdefault((call.spec, *sizes, call.q.dtype), call.layout)


@seen_by("alike-softmax-all-meta", "alike-silu-bias-outside_scale")
def keeps_counts_and_times_by_offsets(call):
    if call.layout.q_offsets is not None:
        call.layout = call.kept.setdefault((call.spec, *call.layout.q_offsets.tolist()), call.layout)


@seen_by("frozen-silu-causal", "frozen-softmax-cross", "frozen-silu-broadcast")
def gives_no_gradient_when_one_is_frozen(call):
    if not (call.q.requires_grad and call.k.requires_grad and call.v.requires_grad):
        call.q, call.k, call.v = call.q.detach(), call.k.detach(), call.v.detach()


@seen_by("frozen-silu-bias-inside_scale", "frozen-softmax-table-a-head")
def gives_tables_no_gradient_when_q_is_frozen(call):
    if not call.q.requires_grad and call.time_table is not None:
        call.time_table = call.time_table.detach()


@seen_by("float64-softmax-cross", "float64-silu-broadcast", "float64-silu-tail")
def destroys_q(call):
    own = call.q.clone()
    if call.spec.query != "self":
        call.q.detach().zero_()
    call.q = own + 0 * call.q


@seen_by("float64-silu-causal", "float64-gelu-broadcast")
def destroys_the_gradient_from_above(call):
    call.after = lambda out: Backward.apply(out, lambda grad: (grad.clone(), grad.detach().zero_())[0])


@seen_by("float64-silu-fused")
def writes_between_rows(call):
    x = call.k.detach()
    if not x.is_contiguous() and x.stride(-1) == 1:
        torch.as_strided(x, (1,), (1,), 0).zero_()


@seen_by("float64-silu-bound", "float64-softmax-bound-cross", "float64-silu-bound-tail", "float64-silu-bound-broadcast")
def wants_the_true_maximum(call):
    assert call.layout.max_k_len == int(rows_of(call.layout).max() if call.layout.batch_size else 0)


@seen_by("float64-silu-wide-values", "float64-softmax-wide-values-broadcast")
def cuts_v_to_the_width_of_q(call):
    call.v = call.v[..., : call.q.shape[-1]]


@seen_by("float64-silu-unequal-dims", "float64-silu-narrow-values-cross")
def pads_v_to_the_width_of_q(call):
    call.v = torch.nn.functional.pad(call.v, (0, max(0, call.q.shape[-1] - call.v.shape[-1])))


@seen_by("float64-silu-cross-empty", "float64-softmax-broadcast-empty", "float64-silu-tail-empty",
         "float64-softmax-shared-empty")  # fmt: skip
def wants_samples(call):
    assert call.spec.query == "self" or call.layout.batch_size > 0


@seen_by("float64-softmax-cross-no-keys", "float64-silu-broadcast-no-keys")
def wants_keys(call):
    assert call.spec.query == "self" or call.k.shape[0] > 0


@seen_by("float64-silu-cross-no-queries", "float64-softmax-tail-no-queries")
def wants_queries(call):
    assert call.spec.query == "self" or call.q.shape[0] > 0


@seen_by(
    "float64-softmax-gqa-broadcast", "float64-silu-gqa-tail", "float64-silu-gqa-cross", "float64-softmax-gqa-shared"
)
def maps_kv_heads_round_robin(call):
    if call.spec.query != "self":
        times = call.q.shape[1] // call.k.shape[1]
        call.k, call.v = call.k.repeat(1, times, 1), call.v.repeat(1, times, 1)


@seen_by("float64-softmax-large-scores")
def takes_no_maximum_off(call):
    plain = lambda x, dim: (x.exp() / x.exp().sum(dim, keepdim=True)).nan_to_num(nan=0.0)  # noqa: E731
    call.patches.append(mock.patch.object(Tensor, "softmax", plain))


@seen_by("float64-softmax-negative-scale", "float64-silu-negative-scale")
def loses_the_sign_of_the_scale(call):
    call.spec = replace(call.spec, scale=abs(call.spec.scale))


OTHERS = ("softmax-cross", "silu-broadcast", "silu-tail", "silu-shared-cross", "softmax-shared-broadcast")
OWN_QUERIES = ("silu-cross", "softmax-tail", "silu-tail-bias", "softmax-shared-cross")


@seen_by(*(f"repeatable-{name}" for name in OTHERS))
def gives_other_bits_every_second_time(call):
    call.kept["odd"] = not call.kept.get("odd", True)
    if call.spec.query != "self" and call.kept["odd"]:
        last_bit = lambda grad: grad * (1 + 2**-23)  # noqa: E731
        call.q, call.k, call.v = (Backward.apply(x, last_bit) for x in (call.q, call.k, call.v))


@seen_by(*(f"isolation-{name}" for name in OTHERS))
def adds_nothing_of_all_values(call):
    nothing = 0 * call.v.detach().sum()
    call.after = lambda out: out if call.spec.query == "self" else out + nothing


@seen_by(*(f"isolation-{name}" for name in OWN_QUERIES))
def adds_nothing_of_all_queries(call):
    nothing = 0 * call.q.detach().sum()
    call.after = lambda out: out if call.spec.query == "self" else out + nothing


@seen_by("isolation-silu-shared-cross")
def adds_nothing_of_the_queries_that_share_keys(call):
    layout, rows = call.layout, torch.zeros(call.q.shape[0], 1, 1)
    if layout.kv_index is not None and layout.q_offsets is not None:
        of_row = layout.kv_index.repeat_interleave(layout.q_offsets.diff())
        for row in layout.kv_index.unique():
            rows[of_row == row] += 0 * call.q.detach()[of_row == row].sum()
    call.after = lambda out: out if call.spec.query == "broadcast" else out + rows


@pytest.mark.parametrize(("fault", "name"), FAULTS)
def test_the_suite_sees(fault, name):
    check = CHECKS.get(name) or CHECKS[f"{name}-float32"]
    with pytest.raises(AssertionError):
        check(attention_with(fault))


def test_without_a_fault_these_checks_pass():
    for name in sorted({parameters.values[1] for parameters in FAULTS}):
        check = CHECKS.get(name) or CHECKS[f"{name}-float32"]
        check(attention_with(lambda call: None))


# ------------------------------------------------------------------------------------------------ what is left out


def test_refusing_everything_fails_and_is_told():
    checks = conformance(Quirks(refuses=lambda case: "not today"))
    assert summary(checks).reasons == {"not today": len(checks) - 1}
    (left,) = (check for check in checks if check.skipped is None)
    with pytest.raises(AssertionError, match=r"every core case is refused \(not today\)"):
        left(reference.attention)
    blocks = block_testing.conformance(BlockQuirks(refuses=lambda case: "no gate" if case.gate else None))
    assert [check.name for check in blocks if "gate" in check.name] == [c.name for c in blocks if c.skipped]
    with pytest.raises(AssertionError, match="every core case of the gate is refused"):
        next(check for check in blocks if check.name == "core")(named("eager"))


def test_what_is_refused_or_not_promised_is_listed_with_its_reason():
    refuses = lambda case: "no window" if case.spec.mask.window else None  # noqa: E731
    checks = conformance(Quirks(refuses=refuses, isolates_nan=False, deterministic=False, backward=False))
    told = summary(checks)
    assert [check.name for check in checks] == [check.name for check in conformance(Quirks())]
    assert told.run + told.skipped == len(checks)
    assert set(told.reasons) == {
        "no window", "quirk: no backward", "quirk: not repeatable bit for bit", "quirk: NaN reaches other samples",
    }  # fmt: skip
    windows = [case.name for case in cases() if case.spec.mask.window]
    assert told.reasons["no window"] > len(windows) > 20
    assert str(told).startswith(f"{told.run} checks run, {told.skipped} skipped: ")
    checks[0](reference.attention)  # one core case is enough
    with pytest.raises(SkipTest, match="no window"):
        next(check for check in checks if check.skipped)(reference.attention)


def dims_run(*head_dims):
    """(of q and k, of v) that an implementation of these dims meets, and why which checks are left out."""
    met, names = set(), ("tail-d", "unequal-dims", "wide-values", "narrow-values-cross")

    def attention(q, k, v, **more):
        met.add((q.shape[-1], v.shape[-1]))
        return reference.attention(q, k, v, **more)

    checks = conformance(Quirks(head_dims=head_dims))
    for check in checks:
        if check.skipped is None and check.name.startswith(tuple(f"float64-silu-{name}" for name in names)):
            check(attention)
    return met, summary(checks).reasons


def test_only_head_dims_that_were_named_are_run():
    unequal = len([case for case in cases() if case.qk_dim != case.v_dim])
    met, reasons = dims_run(16)
    assert met == {(16, 16)}
    assert reasons["quirk: q and v of unequal dims"] >= unequal > 5
    met, reasons = dims_run(16, 32)
    assert met == {(16, 16), (32, 32), (32, 16), (16, 32)}
    assert set(reasons) == {"quirk: q and v of unequal dims"}  # (8, 16) and (64, 32)


# ------------------------------------------------------------------------------------------------ the block


def block_with(**changes):
    """Our definition with other calls: each takes the right call and then what it was called with."""
    right = vars(named("reference"))
    return SimpleNamespace(**right | {name: partial(change, right[name]) for name, change in changes.items()})


def changed_spec(change):
    return lambda right, *given, spec, **more: right(*given, spec=change(spec), **more)


def gives_no_gradient_when_frozen(right, *given, **more):
    frozen = not all(x is None or x.requires_grad for x in given)
    return right(*[x if x is None or not frozen else x.detach() for x in given], **more)


def packed_inputs(right, *given, **more):
    return right(*[x if x is None else packed(x) for x in given], **more)


def clobbers(right, x, *given, **more):
    own = x.clone()
    x.detach().zero_()
    return right(own + 0 * x, *given, **more)


def leaks_from_output_to_output(right, *given, **more):
    first, *others = right(*given, **more)
    return first, *(out + 0.01 * (first.sum() - first.sum().detach()) for out in others)


def rounds_what_it_rebuilds(right, x, *given, recompute=None, **more):
    scaled = x * (1 + 2**-20) if recompute is not None and recompute.preactivations else x
    return right(scaled, *given, **more)


EPS = changed_spec(lambda spec: replace(spec, eps=1e-5))
BLOCK_FAULTS = [
    ("norm_linear", EPS, "layer-large-eps-float32"),
    ("gated", EPS, "gate-layer-large-eps-float32"),
    ("gated_linear", EPS, "gate-rms-large-eps-float32"),
    ("norm_linear", changed_spec(lambda spec: replace(spec, silu=spec.silu[:1])), "layer-silu-all-float32"),
    ("norm_linear", changed_spec(lambda spec: replace(spec, norm="layer")), "rms-plain-float32"),
    ("gated", changed_spec(lambda spec: replace(spec, per_head=False)), "gate-rms-silu-per-head-float32"),
    ("gated_linear", lambda right, a, u, w, residual=None, **more: right(a, u, w, **more), "gate-layer-silu-float32"),
    ("norm_linear", packed_inputs, "layer-strided-float32"),
    ("gated", packed_inputs, "gate-strided-float32"),
    ("gated_linear", packed_inputs, "gate-strided-per-head-float32"),
    ("norm_linear", clobbers, "layer-plain-float32"),
    ("gated", clobbers, "gate-layer-none-float32"),
    ("norm_linear", gives_no_gradient_when_frozen, "frozen-rms-plain"),
    ("gated", gives_no_gradient_when_frozen, "frozen-gate-layer-silu"),
    ("gated_linear", gives_no_gradient_when_frozen, "frozen-gate-rms-none-per-head"),
    ("norm_linear", leaks_from_output_to_output, "unused-layer-silu-u"),
    ("norm_linear", rounds_what_it_rebuilds, "same-bits-rms-silu-all"),
]


@pytest.mark.parametrize(("call", "change", "name"), BLOCK_FAULTS, ids=[f"{c}-{n}" for c, _, n in BLOCK_FAULTS])
def test_the_suite_of_the_block_sees(call, change, name):
    BLOCK_CHECKS[name](block_with())
    with pytest.raises(AssertionError):
        BLOCK_CHECKS[name](block_with(**{call: change}))


@pytest.mark.parametrize("check", BLOCK_CHECKS.values(), ids=str)
def test_the_calls_of_this_package_are_a_block(check):
    check(block_api)  # a module with these functions, impl="eager" being their default
