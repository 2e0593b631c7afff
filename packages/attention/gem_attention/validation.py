"""What is refused, and why: one place, so that every implementation gives the same errors.

Three layers, by when they can be known:
  check_*_spec   when a spec is made: combinations that mean nothing, or mean two things
  check_layout   when a batch's Layout is made: offsets, counts, kv rows; the only place that reads values of tensors
                 (one wait for the device a batch, not one a layer)
  check_call     at each call: shapes, dtypes and devices against spec and layout; host numbers only
All sizes are Python integers, so no check overflows, whatever the number of elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gem_attention.interface import AttentionSpec, BiasSpec, Layout, MaskSpec, RotarySpec, TimeBuckets

ACTIVATIONS = ("softmax", "silu", "gelu", "gelu_tanh", "gelu_poly", "relu", "relu2", "identity")
QUERY_KINDS = ("self", "cross", "broadcast", "tail")
MAX_SPAN_S = 2**31 - 2  # of the timestamps of one sample
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _require(ok: bool, message: str | Callable[[], str]) -> None:
    """Per-call checks pass a function: text is made only when wrong, and sizes that a compiler traces stay symbols."""
    if not ok:
        raise ValueError(message if isinstance(message, str) else message())


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    _require(value in allowed, f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _whole(name: str, value: object, low: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
    _require(ok, f"{name}={value!r}: expected a whole number >= {low}")


# ------------------------------------------------------------------------------------------------ specs


def check_mask_spec(mask: MaskSpec) -> None:
    """Refuse rules that mean nothing together, and those that two systems read differently unless one is named."""
    _whole("mask.target_group_size", mask.target_group_size, 1)
    for name in ("window", "min_full_rows", "block"):
        _whole(f"mask.{name}", getattr(mask, name), 0)
    _one_of("mask.semantics", mask.semantics, (None, "meta", "nvidia"))
    rules = {
        "causal": mask.causal,
        "targets": mask.targets,
        "context": mask.context,
        "window": mask.window > 0,
        "min_full_rows": mask.min_full_rows > 0,
    }
    named = [name for name, on in rules.items() if on]
    _require(
        not (mask.block and named),
        f"mask.block={mask.block} cuts a sequence into closed blocks and mixes with no other rule; got also "
        f"{', '.join(named)}: drop these or set block=0",
    )
    _require(
        mask.min_full_rows == 0 or mask.window > 0,
        f"mask.min_full_rows={mask.min_full_rows} lifts a window, but window=0: give a window or drop min_full_rows",
    )
    _require(
        mask.target_group_size == 1 or mask.targets,
        f"mask.target_group_size={mask.target_group_size} groups targets, but targets=False: set targets=True",
    )
    _require(
        mask.target_group_size == 1 or mask.semantics == "nvidia",
        f"mask.target_group_size={mask.target_group_size} exists in the 'nvidia' semantics only; got "
        f"semantics={mask.semantics!r}: set semantics='nvidia' or target_group_size=1",
    )
    _require(
        not (mask.targets and mask.window and mask.semantics is None),
        f"targets with window={mask.window} differ between public systems: set semantics='meta' (all targets see the "
        "same last items) or 'nvidia' (the k-th target sees k fewer)",
    )
    _require(
        mask.causal or not mask.targets or mask.semantics == "meta",
        f"targets without causal are defined by the 'meta' semantics only; got semantics={mask.semantics!r}: "
        "set causal=True or semantics='meta'",
    )


def check_time_buckets(buckets: TimeBuckets) -> None:
    _one_of("time.function", buckets.function, ("log", "sqrt"))
    _require(math.isfinite(buckets.step) and buckets.step > 0, f"time.step={buckets.step}: expected a number > 0")
    _whole("time.count", buckets.count, 1)


def check_bias_spec(bias: BiasSpec) -> None:
    _one_of("bias.where", bias.where, ("inside_scale", "outside_scale"))
    _whole("bias.max_positions", bias.max_positions, 0)
    _require(
        bias.max_positions > 0 or bias.time is not None,
        "a BiasSpec needs max_positions > 0, time buckets, or both; for no bias leave AttentionSpec.bias=None",
    )


def check_rotary_spec(rotary: RotarySpec) -> None:
    _one_of("rotary.pairing", rotary.pairing, ("interleaved", "halves"))
    for name in ("base", "time_base", "time_scale_s"):
        value = getattr(rotary, name)
        ok = (value is None and name == "time_scale_s") or (value is not None and math.isfinite(value) and value > 0)
        _require(ok, f"rotary.{name}={value!r}: expected a finite number > 0")


def check_spec(spec: AttentionSpec) -> None:
    _one_of("activation", spec.activation, ACTIVATIONS)
    _one_of("query", spec.query, QUERY_KINDS)
    _require(math.isfinite(spec.scale), f"scale={spec.scale}: expected a finite number")
    if spec.divisor != "per_token":
        ok = isinstance(spec.divisor, int | float) and math.isfinite(spec.divisor) and spec.divisor > 0
        _require(ok, f"divisor={spec.divisor!r}: expected a number > 0 or 'per_token'")
    _require(
        spec.activation != "softmax" or spec.divisor == 1,
        f"softmax is normalised already; divisor={spec.divisor!r} would shrink it: set divisor=1.0",
    )
    if spec.query in ("cross", "broadcast"):
        _require(
            spec.mask == type(spec.mask)(),
            f"query={spec.query!r} has no common positions of queries and keys, so no mask is defined; got "
            f"{spec.mask}: use MaskSpec(), or query='self' or 'tail'",
        )
        _require(
            spec.bias is None,
            f"query={spec.query!r} has no common positions of queries and keys, so no bias is defined: set bias=None",
        )


# ------------------------------------------------------------------------------------------------ layouts


def _check_index_tensor(name: str, t: Tensor, *, device: torch.device | None = None, rows: int | None = None) -> None:
    _require(isinstance(t, Tensor), f"{name}: expected a tensor, got {type(t).__name__}")
    _require(t.dim() == 1, f"{name}: expected one dimension, got shape {tuple(t.shape)}")
    _require(t.dtype == torch.int64, f"{name}: expected int64, got {t.dtype}: call .long()")
    if device is not None:
        _require(t.device == device, f"{name} is on {t.device}, the key offsets on {device}: move one of them")
    if rows is not None:
        _require(t.shape[0] == rows, f"{name}: expected {rows} entries, got {t.shape[0]}")


def _check_offsets(name: str, offsets: list[int], total: int, max_len: int) -> None:
    _require(offsets[0] == 0, f"{name}[0] is {offsets[0]}: offsets start at 0")
    for i, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end < start:
            raise ValueError(f"{name} goes down at position {i + 1}: {start} then {end}; offsets never decrease")
        if end - start > max_len:
            raise ValueError(
                f"sample {i} has {end - start} rows ({name}), more than the maximum length {max_len} of the layout"
            )
    _require(offsets[-1] == total, f"{name}[-1] is {offsets[-1]}, but the layout has {total} rows: they must be equal")


def check_layout_shapes(layout: Layout) -> None:
    """Shapes, dtypes and devices of a layout; reads no value."""
    ko, qo = layout.k_offsets, layout.q_offsets
    _check_index_tensor("k_offsets", ko)
    _require(ko.shape[0] >= 1, "k_offsets is empty: a batch of no samples has offsets [0]")
    rows = ko.shape[0] - 1
    if qo is not None:
        _check_index_tensor("q_offsets", qo, device=ko.device)
        _require(qo.shape[0] >= 1, "q_offsets is empty: a batch of no samples has offsets [0]")
        _require(
            qo.shape[0] - 1 == layout.batch_size,
            f"q_offsets has {qo.shape[0] - 1} samples, the layout {layout.batch_size}",
        )
    if layout.kv_index is None:
        _require(
            rows == layout.batch_size,
            f"k_offsets has {rows} rows for {layout.batch_size} samples: give one row a sample, or a kv_index",
        )
    else:
        _check_index_tensor("kv_index", layout.kv_index, device=ko.device, rows=layout.batch_size)
    for name in ("num_targets", "num_context"):
        t = getattr(layout, name)
        if t is not None:
            _check_index_tensor(name, t, device=ko.device, rows=layout.batch_size)
    if layout.timestamps is not None:
        _check_index_tensor("timestamps", layout.timestamps, device=ko.device, rows=layout.total_k)


def check_layout(layout: Layout) -> None:
    """Everything about a layout, values included (brings the index tensors to the host once)."""
    check_layout_shapes(layout)
    k_offsets = layout.k_offsets.tolist()
    _check_offsets("k_offsets", k_offsets, layout.total_k, layout.max_k_len)
    if layout.q_offsets is not None and layout.q_offsets is not layout.k_offsets:
        _check_offsets("q_offsets", layout.q_offsets.tolist(), layout.total_q, layout.max_q_len)
    if layout.tail:
        _check_tail(layout, k_offsets)
    rows = len(k_offsets) - 1
    if layout.timestamps is not None:
        _check_times(layout.timestamps, layout.k_offsets)
    if layout.kv_index is not None:
        before = 0
        for b, row in enumerate(layout.kv_index.tolist()):
            _require(0 <= row < rows, f"kv_index[{b}] is {row}: k and v have {rows} rows, valid are 0 to {rows - 1}")
            _require(
                row >= before,
                f"kv_index goes down at position {b}: {before} then {row}; sort the samples by kv row, so that those "
                "which share one stand together",
            )
            before = row
    if layout.num_targets is None and layout.num_context is None:
        return
    _require(
        layout.kv_index is None, "kv_index shares keys between samples; targets and context are rules of one sample"
    )
    zeros = [0] * layout.batch_size
    targets = zeros if layout.num_targets is None else layout.num_targets.tolist()
    context = zeros if layout.num_context is None else layout.num_context.tolist()
    for b, (m, c) in enumerate(zip(targets, context, strict=True)):
        n = k_offsets[b + 1] - k_offsets[b]
        _require(m >= 0, f"num_targets[{b}] is {m}: expected >= 0")
        _require(c >= 0, f"num_context[{b}] is {c}: expected >= 0")
        _require(
            m + c <= n,
            f"sample {b} has {n} tokens, fewer than its {c} context tokens and {m} targets; no public system defines "
            "this: lower num_context or num_targets of that sample",
        )


def _check_times(timestamps: Tensor, k_offsets: Tensor) -> None:
    """Times of one sample lie so near one another that their differences fit into 32 bits, as kernels take them."""
    lengths = k_offsets.diff()
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    least, greatest = (
        torch.zeros_like(lengths).scatter_reduce(0, sample, timestamps, how, include_self=False)
        for how in ("amin", "amax")
    )
    span = (greatest - least).tolist()
    for b, seconds in enumerate(span):
        _require(
            0 <= seconds <= MAX_SPAN_S,
            f"timestamps of sample {b} span {seconds} s, expected at most {MAX_SPAN_S} (68 years); in seconds?",
        )


def _check_tail(layout: Layout, k_offsets: list[int]) -> None:
    _require(layout.q_offsets is not None, "tail=True needs q_offsets and k_offsets")
    _require(layout.kv_index is None, "tail=True cannot share kv rows: drop kv_index or tail")
    assert layout.q_offsets is not None
    lengths = zip(itertools.pairwise(layout.q_offsets.tolist()), itertools.pairwise(k_offsets), strict=True)
    for b, ((q_start, q_end), (k_start, k_end)) in enumerate(lengths):
        if q_end - q_start > k_end - k_start:
            raise ValueError(
                f"sample {b} has {q_end - q_start} queries and {k_end - k_start} keys; with tail=True the queries are "
                "the last rows of the keys, so there cannot be more"
            )


# ------------------------------------------------------------------------------------------------ calls


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    layout: Layout,
    position_table: Tensor | None,
    time_table: Tensor | None,
    divisor: Tensor | None,
) -> None:
    """Tensors of one call against spec and layout: shapes, dtypes, devices; reads no value."""
    _check_qkv(q, k, v, layout.k_offsets.device)
    _require(
        k.shape[0] == layout.total_k, lambda: f"k has {k.shape[0]} rows, the layout {layout.total_k} (k_offsets[-1])"
    )
    _check_query_kind(q, spec, layout)
    _check_needed("mask.targets", spec.mask.targets, "num_targets", layout.num_targets)
    _check_needed("mask.context", spec.mask.context, "num_context", layout.num_context)
    has_time = spec.bias is not None and spec.bias.time is not None
    _check_needed("bias.time", has_time, "timestamps", layout.timestamps)
    positions = spec.bias.max_positions if spec.bias is not None else 0
    _check_table("position_table", position_table, 2 * positions - 1 if positions else 0, q)
    _check_table("time_table", time_table, spec.bias.time.count if spec.bias and spec.bias.time else 0, q)
    _require(
        positions == 0 or layout.max_k_len <= positions,
        lambda: (
            f"the layout allows {layout.max_k_len} tokens a sample, bias.max_positions is {positions}: raise it or cut"
        ),
    )
    rows = q.shape[0] * (layout.batch_size if spec.query == "broadcast" else 1)
    if spec.divisor == "per_token":
        if divisor is None:
            raise ValueError("spec.divisor is 'per_token', but no divisor was given: pass divisor=(one number per row)")
        _require(divisor.shape == (rows,), lambda: f"divisor: expected shape ({rows},), got {tuple(divisor.shape)}")
        _check_like_q("divisor", divisor, q)
        _require(not divisor.requires_grad, lambda: "divisor has no gradient: pass divisor.detach()")
    else:
        _require(
            divisor is None, lambda: f"a divisor tensor was given, but spec.divisor is {spec.divisor}: set 'per_token'"
        )


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, device: torch.device) -> None:
    _check_tensor("q", q, device)
    _check_tensor("k", k, device)
    _check_tensor("v", v, device)
    _require(q.dtype == k.dtype == v.dtype, lambda: f"q, k, v must share a dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    _require(k.shape[:2] == v.shape[:2], lambda: f"k and v must agree in rows and heads; got {_shapes(k, v)}")
    _require(q.shape[2] == k.shape[2], lambda: f"q and k must agree in head dim; got {_shapes(q, k)}")
    _require(q.shape[2] > 0 and v.shape[2] > 0, lambda: f"head dims must be > 0; got q {_shapes(q)}, v {_shapes(v)}")
    heads, kv_heads = q.shape[1], k.shape[1]
    _require(
        kv_heads > 0 and heads > 0 and heads % kv_heads == 0,
        lambda: (
            f"{heads} query heads cannot share {kv_heads} kv heads: the first must be a positive multiple of the second"
        ),
    )


def _check_tensor(name: str, t: Tensor, device: torch.device) -> None:
    _require(t.dim() == 3, lambda: f"{name}: expected (tokens, heads, dim), got shape {tuple(t.shape)}")
    _require(t.dtype in DTYPES, lambda: f"{name}: expected a floating dtype, got {t.dtype}")
    _require(t.device == device, lambda: f"{name} is on {t.device}, the layout on {device}: move one of them")


def _check_query_kind(q: Tensor, spec: AttentionSpec, layout: Layout) -> None:
    kind = spec.query
    if kind == "broadcast":
        _require(
            layout.q_offsets is None,
            lambda: "query='broadcast' has dense q (S, H, D): build the layout without q_offsets",
        )
    else:
        _require(layout.q_offsets is not None, lambda: f"query={kind!r} needs q_offsets, but the layout has none")
        _require(
            q.shape[0] == layout.total_q,
            lambda: f"q has {q.shape[0]} rows, the layout {layout.total_q} (q_offsets[-1])",
        )
    if kind == "self":
        _require(
            layout.q_offsets is layout.k_offsets,
            lambda: "query='self' needs one set of offsets: build the layout with q_offsets only (no k_offsets)",
        )
    _require(
        layout.tail == (kind == "tail"),
        lambda: f"query={kind!r}, but the layout was built with tail={layout.tail}: only query='tail' takes tail=True",
    )
    if kind in ("self", "tail"):
        _require(
            layout.kv_index is None, lambda: f"query={kind!r} cannot share kv rows: use query='cross' or no kv_index"
        )


def _check_needed(rule: str, on: bool, name: str, tensor: Tensor | None) -> None:
    _require(
        not on or tensor is not None,
        lambda: f"spec.{rule} is set, but the layout has no {name}: pass it to make_layout",
    )


def _check_table(name: str, table: Tensor | None, columns: int, q: Tensor) -> None:
    if columns == 0:
        _require(table is None, lambda: f"{name} was given, but the spec's bias does not use it")
        return
    if table is None:
        raise ValueError(f"the spec's bias needs {name}, (heads, {columns})")
    ok = table.dim() == 2 and table.shape[1] == columns and table.shape[0] > 0 and q.shape[1] % table.shape[0] == 0
    _require(
        ok,
        lambda: (
            f"{name}: expected (heads, {columns}) with heads a divisor of {q.shape[1]}; got shape {tuple(table.shape)}"
        ),
    )
    _check_like_q(name, table, q)


def _check_like_q(name: str, t: Tensor, q: Tensor) -> None:
    _require(t.device == q.device, lambda: f"{name} is on {t.device}, q on {q.device}: move one of them")
    _require(t.dtype in (torch.float32, q.dtype), lambda: f"{name}: expected float32 or q's {q.dtype}, got {t.dtype}")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)
