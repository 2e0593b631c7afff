"""The cases of the conformance suite and the inputs they name; all public through gem_attention.testing.

`usual_cases` is every mask, activation, bias, query kind and shape of batch once. `hard_cases` is what an
implementation can get wrong while all of these pass: sizes, strides, times, tables and bounds at which the usual ones
do not stand. Each of them is there for a fault that went unseen (tests/attention/test_faults.py plants them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from gem_attention.api import make_layout
from gem_attention.interface import Activation, AttentionSpec, BiasSpec, Layout, MaskSpec, TimeBuckets

ACTIVATIONS: tuple[Activation, ...] = (
    "softmax", "silu", "gelu", "gelu_tanh", "gelu_poly", "relu", "relu2", "identity",
)  # fmt: skip
Strided = Literal["", "permuted", "fused", "summed"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One spec on one batch. k_lengths default to q_lengths (self); for broadcast, q_lengths is (S,).

    strided         "permuted": rows are the innermost dim in memory; "fused": slices of a wider tensor whose rest is
                    NaN, as a split projection gives them, last stride 1; "summed": packed, but the gradient from above
                    is one number expanded, as `out.sum()` gives it; "": packed
    position_heads, time_heads   rows of the tables; 0: one a head
    wide_tables     float32 tables whatever the dtype (but for float64); else they have q's
    narrow_divisor  the divisor tensor in q's dtype; else float32
    first_time, time_span   timestamps lie in first_time .. first_time + time_span
    slack           by how much the layout's maximum lengths, which are upper bounds, exceed the true ones
    core            a case that some activation must run: an implementation that refuses all of them proves nothing
    """

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
    strided: Strided = ""
    position_heads: int = 1
    time_heads: int = 0
    wide_tables: bool = False
    narrow_divisor: bool = False
    first_time: int = 0
    time_span: int = 100_000
    slack: int = 0
    core: bool = False
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

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the call by name, those of the layout included."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        layout = vars(self.layout).items()
        return own | {f"layout.{name}": value for name, value in layout if isinstance(value, Tensor)}


# ------------------------------------------------------------------------------------------------ inputs

RAGGED = (7, 0, 33, 1, 18, 2, 5)
UNIFORM = (16, 16, 16)
EDGES = (63, 64, 65, 127, 128, 129)
LONG = (260, 0, 20, 97)
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
    times = torch.randint(0, case.time_span, (sum(keys),), generator=generator).sort().values + case.first_time
    return make_layout(
        q_offsets=None if query == "broadcast" else offsets_of(case.q_lengths, device),
        k_offsets=None if query == "self" else offsets_of(keys, device),
        tail=query == "tail",
        num_targets=ints(case.num_targets),
        num_context=ints(case.num_context),
        kv_index=ints(case.kv_index),
        timestamps=times.to(device) if case.spec.bias is not None and case.spec.bias.time is not None else None,
        max_q_len=max(case.q_lengths, default=0) + case.slack,
        max_k_len=max(keys, default=0) + case.slack,
    )


def laid_out(x: Tensor, strided: Strided) -> Tensor:
    """x (rows, heads, dim) in the memory that Case.strided names."""
    if strided == "permuted" and x.dim() == 3:
        return x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if strided == "fused":  # 8 more columns: rows still begin at multiples of 16 bytes, as kernels may ask
        *rows, heads, dim = x.shape
        wide = x.new_full((*rows, heads + 1, dim + 8), float("nan"))
        wide[..., 1:, 8:] = x
        return wide[..., 1:, 8:]
    return x


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Normal values times 0.5, exact in float16 and bfloat16 alike, so that each dtype sees the same numbers."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, std: float = 0.5) -> Tensor:
        x = (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)
        x = x.to(torch.float16).to(dtype).to(device)
        return laid_out(x, case.strided) if len(shape) > 2 else x

    layout = layout_of(case, device)
    q_rows = case.q_lengths[0] if case.spec.query == "broadcast" else layout.total_q
    q = normal(q_rows, case.heads, case.qk_dim)
    k = normal(layout.total_k, case.kv_heads, case.qk_dim)
    v = normal(layout.total_k, case.kv_heads, case.v_dim)
    bias = case.spec.bias
    positions = bias.max_positions if bias is not None else 0
    position_table = normal(case.position_heads or case.heads, 2 * positions - 1, std=0.3) if positions else None
    time_table = None
    if bias is not None and bias.time is not None:
        time_table = normal(case.time_heads or case.heads, bias.time.count, std=0.3)
    shape: tuple[int, ...] = (q_rows, case.heads, case.v_dim)
    out_rows = q_rows
    if case.spec.query == "broadcast":
        shape, out_rows = (layout.batch_size, *shape), layout.batch_size * q_rows
    divisor = None
    if case.spec.divisor == "per_token":
        divisor = (torch.rand(out_rows, generator=generator) * 20 + 1).to(torch.bfloat16).float().to(device)
    grad_out = normal(*shape) if case.strided != "summed" else normal(*[1] * len(shape)).expand(shape)
    wide = torch.promote_types(dtype, torch.float32)
    return Inputs(
        q=q,
        k=k,
        v=v,
        layout=layout,
        position_table=position_table.to(wide) if position_table is not None and case.wide_tables else position_table,
        time_table=time_table.to(wide) if time_table is not None and case.wide_tables else time_table,
        divisor=divisor.to(dtype) if divisor is not None and case.narrow_divisor else divisor,
        grad_out=grad_out,
    )


# ------------------------------------------------------------------------------------------------ cases


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


class _Cases(list[Case]):
    """Takes cases one by one; each has a seed of its own."""

    def __init__(self, first_seed: int = 0) -> None:
        super().__init__()
        self._first_seed = first_seed

    def add(self, name: str, lengths: tuple[int, ...], spec: AttentionSpec, **more: object) -> None:
        targets = tuple((n + 2) // 3 for n in lengths) if spec.mask.targets else None
        context = tuple(n // 4 for n in lengths) if spec.mask.context else None
        seed = self._first_seed + len(self)
        case = Case(name=name, spec=spec, q_lengths=lengths, num_targets=targets, num_context=context, seed=seed)
        self.append(replace(case, **more))  # type: ignore[arg-type]


def spec_of(activation: Activation = "silu", **more: object) -> AttentionSpec:
    """The suite's spec of this activation, with what `more` changes."""
    divisor = 1.0 if activation == "softmax" else 13.0
    return replace(AttentionSpec(activation=activation, scale=0.25, divisor=divisor), **more)  # type: ignore[arg-type]


def usual_cases() -> list[Case]:
    """Each mask, activation, bias, query kind and shape of batch, not their whole product."""
    result = _Cases()
    add = result.add
    causal = MaskSpec(causal=True)
    for name, mask in _masks().items():
        lengths = EDGES if name == "block" else RAGGED
        add(f"silu-{name}", lengths, spec_of(mask=mask))
        add(f"softmax-{name}", lengths, spec_of("softmax", mask=mask))
    for activation in ACTIVATIONS:
        add(f"{activation}-uniform", UNIFORM, spec_of(activation, mask=causal), core=True)
        add(f"{activation}-cross", (3, 0, 9, 5), spec_of(activation, query="cross"), k_lengths=(12, 4, 0, 7))
        add(f"{activation}-broadcast", (6,), spec_of(activation, query="broadcast"), k_lengths=(12, 0, 1, 30))
    for activation in ("silu", "softmax"):
        add(f"{activation}-edges", EDGES, spec_of(activation, mask=causal))
        add(f"{activation}-gqa", RAGGED, spec_of(activation, mask=causal), heads=4, kv_heads=2)
        add(f"{activation}-mqa-cross", (3, 8, 2), spec_of(activation, query="cross"), k_lengths=(9, 4, 20), heads=4,
            kv_heads=1)  # fmt: skip
        add(f"{activation}-unequal-dims", RAGGED, spec_of(activation, mask=causal), qk_dim=32, v_dim=16)
        add(f"{activation}-strided", RAGGED, spec_of(activation, mask=causal), strided="permuted")
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
            both = BiasSpec(where=where, max_positions=40, time=buckets)  # type: ignore[arg-type]
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


def hard_cases() -> list[Case]:
    """Where the usual cases do not stand."""
    result = _Cases(first_seed=500)
    _hard_masks(result)
    _hard_biases(result)
    _hard_shapes(result)
    return result


def _hard_masks(result: _Cases) -> None:
    """Windows and blocks of many sizes; samples of targets or context alone, and without any."""
    add = result.add
    add("silu-window-16", LONG, spec_of(mask=MaskSpec(causal=True, window=16)))
    add("softmax-window-100", LONG, spec_of("softmax", mask=MaskSpec(window=100)))
    add("softmax-window-200", LONG, spec_of("softmax", mask=MaskSpec(causal=True, window=200)))
    add("silu-window-40-all", LONG, spec_of(mask=MaskSpec(
        causal=True, targets=True, context=True, window=40, min_full_rows=20, semantics="meta"
    )))  # fmt: skip
    add("softmax-block-5", RAGGED, spec_of("softmax", mask=MaskSpec(block=5)))
    add("silu-block-16", LONG, spec_of(mask=MaskSpec(block=16)))
    add("silu-block-100", LONG, spec_of(mask=MaskSpec(block=100)))
    alone = {"num_targets": (0, 0, 0, 1, 18, 0, 2), "num_context": (7, 0, 20, 0, 0, 0, 3)}  # of RAGGED
    for activation in ("silu", "softmax"):
        for name in ("noncausal-targets", "context-targets", "all-meta", "all-nvidia"):
            add(f"{activation}-{name}-alone", RAGGED, spec_of(activation, mask=_masks()[name]), **alone)


def _hard_biases(result: _Cases) -> None:
    """Times as clocks give them, and tables of one row, a row a head and fewer, in either dtype."""
    add = result.add
    causal = MaskSpec(causal=True)
    time = BiasSpec(where="outside_scale", time=TimeBuckets(count=24))
    both = replace(time, max_positions=40)
    seconds = {"first_time": 1_790_000_000, "time_span": 500}
    add("softmax-unix-seconds", RAGGED, spec_of("softmax", bias=time), **seconds)  # without a mask: gaps below 0 too
    add("silu-unix-milliseconds", RAGGED, spec_of(mask=causal, bias=both), first_time=1_790_000_000_000, time_span=5000)
    for activation in ("silu", "softmax"):
        spec = spec_of(activation, mask=causal, bias=both)
        add(f"{activation}-table-a-head", RAGGED, spec, heads=4, kv_heads=2, position_heads=0)
        add(f"{activation}-table-two-heads", RAGGED, spec, heads=4, kv_heads=4, position_heads=2, time_heads=2)
        add(f"{activation}-table-one", RAGGED, spec, time_heads=1)
        add(f"{activation}-table-wide", RAGGED, spec, heads=4, kv_heads=2, position_heads=2, wide_tables=True)
    tail = spec_of(query="tail", mask=causal, bias=replace(both, max_positions=80))
    add("silu-table-tail", (3, 0, 5, 1), tail, k_lengths=(9, 4, 5, 70), heads=4, position_heads=2, time_heads=2)
    add("silu-layers", RAGGED, spec_of(mask=_masks()["all-meta"], bias=both))
    add("silu-narrow-divisor", RAGGED, spec_of(mask=causal, divisor="per_token"), narrow_divisor=True)


def _hard_shapes(result: _Cases) -> None:
    """Strides, dims, heads, bounds, batches without rows on either side, and scores of any size and sign."""
    add = result.add
    causal = MaskSpec(causal=True)
    tail = {"k_lengths": (9, 4, 5, 70)}
    for activation in ("silu", "softmax"):
        own, cross = spec_of(activation, mask=causal), spec_of(activation, query="cross")
        seeds, last = spec_of(activation, query="broadcast"), spec_of(activation, query="tail", mask=causal)
        four = {"heads": 4, "kv_heads": 2}
        add(f"{activation}-fused", RAGGED, own, strided="fused", **four)
        add(f"{activation}-fused-broadcast", (5,), seeds, strided="fused", k_lengths=(12, 0, 9))
        add(f"{activation}-summed", RAGGED, own, strided="summed")
        add(f"{activation}-wide-values", RAGGED, own, qk_dim=16, v_dim=32)
        add(f"{activation}-wide-values-broadcast", (5,), seeds, qk_dim=16, v_dim=32, k_lengths=(12, 0, 9))
        add(f"{activation}-narrow-values-cross", (3, 8), cross, qk_dim=32, v_dim=16, k_lengths=(9, 20))
        add(f"{activation}-gqa-cross", (3, 8, 2), cross, k_lengths=(9, 4, 20), **four)
        add(f"{activation}-gqa-broadcast", (5,), seeds, k_lengths=(12, 0, 9), **four)
        add(f"{activation}-gqa-tail", (3, 0, 5, 1), last, **tail, **four)
        add(f"{activation}-gqa-shared", (3, 8, 2), cross, k_lengths=(9, 20), kv_index=(0, 0, 1), **four)
        add(f"{activation}-bound", RAGGED, own, slack=5)
        add(f"{activation}-bound-cross", (3, 8, 2), cross, k_lengths=(9, 4, 20), slack=70)
        add(f"{activation}-bound-broadcast", (5,), seeds, k_lengths=(12, 0, 9), slack=5)
        add(f"{activation}-bound-tail", (3, 0, 5, 1), last, **tail, slack=60)
        add(f"{activation}-cross-empty", EMPTY, cross, k_lengths=EMPTY)
        add(f"{activation}-cross-no-keys", (4, 0), cross, k_lengths=(0, 0))
        add(f"{activation}-cross-no-queries", (0, 0), cross, k_lengths=(4, 0))
        add(f"{activation}-broadcast-empty", (4,), seeds, k_lengths=EMPTY)
        add(f"{activation}-broadcast-no-keys", (4,), seeds, k_lengths=(0, 0))
        add(f"{activation}-tail-empty", EMPTY, last, k_lengths=EMPTY)
        add(f"{activation}-tail-no-queries", (0, 0), last, k_lengths=(4, 0))
        add(f"{activation}-shared-empty", EMPTY, cross, k_lengths=(3, 2), kv_index=EMPTY)
        add(f"{activation}-negative-scale", RAGGED, replace(own, scale=-0.3))
    # exp of these scores is beyond float32: a softmax has to take the row's maximum off first
    add("softmax-large-scores", RAGGED, spec_of("softmax", mask=causal, scale=60.0))
    bias = BiasSpec(where="inside_scale", max_positions=40)
    add("silu-bound-bias", RAGGED, spec_of(mask=causal, bias=bias), slack=7)


def cases() -> list[Case]:
    """The suite's cases."""
    return [*usual_cases(), *hard_cases()]
