"""Floating-point operations of one batch, from real lengths and masks, never from padding.

Counted are matrix products, a multiply-add as two: linear layers, token maps, factorization machines, and attention
over the pairs that its mask lets meet. Norms, activations, rotary turns and lookups are not: they are bound by memory,
and counting them would flatter. Backward of a linear layer is twice its forward; once where its input is data, which
takes no gradient; attention has its own count, with the scores computed again. The formulas stand here once more,
beside the modules, and a test holds both together with torch's own counter.

Letters: B rows, N events, T packed tokens, D width of the features, d width of a stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from gem_attention.counting import AttentionCount, count_attention
from gem_attention.interface import AttentionSpec
from gem_data.interface import Schema
from torch import Tensor

from gem_pipelines.model.common import mlp_flops
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.dhen import dhen_flops
from gem_pipelines.model.heads import heads_flops
from gem_pipelines.model.hstu import hstu_spec
from gem_pipelines.model.kunlun import pffn_spec, pooling_spec, self_attention_spec
from gem_pipelines.model.plan import ModelPlan, StreamPlan, plan_model
from gem_pipelines.model.target_read import read_spec
from gem_pipelines.model.wukong import experts_flops, wukong_flops

PARTS = ("sequence", "cross", "interaction", "heads")


def model_flops(
    config: ModelConfig, schema: Schema, lengths: Mapping[str, Sequence[int] | Tensor], *, rows: int | None = None
) -> dict[str, int]:
    """Forward FLOPs of one batch by part. lengths: stream -> events of each row; rows only where there is no stream.

    Example: one stream of width d = 8 with rows of 3 and 5 events and a candidate has 10 tokens; its HSTU block's two
    linear layers cost 2 * 10 * (4 * 64 + 64) = 6,400, its causal attention 2 * 2 * 8 * (10 + 21) = 992.
    """
    return _count(config, schema, lengths, rows).forward


def training_flops(
    config: ModelConfig, schema: Schema, lengths: Mapping[str, Sequence[int] | Tensor], *, rows: int | None = None
) -> dict[str, int]:
    """Forward and backward FLOPs of one batch by part; see model_flops."""
    tally = _count(config, schema, lengths, rows)
    return {part: tally.forward[part] + tally.backward[part] for part in PARTS}


@dataclass(frozen=True, kw_only=True)
class _Tally:
    forward: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    backward: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def add(self, part: str, flops: int, *, of_data: bool = False) -> None:
        """A product of which both factors take gradients, or one (`of_data`)."""
        self.forward[part] += flops
        self.backward[part] += flops if of_data else 2 * flops

    def rows(self, part: str, flops: _FlopsOfLength, rows_of_length: Mapping[int, int]) -> None:
        """One call over a stream's rows; rows of equal length are counted together."""
        for length, rows in rows_of_length.items():
            forward, backward = flops[length]
            self.forward[part] += rows * forward
            self.backward[part] += rows * backward

    def attention(self, part: str, spec: AttentionSpec, stream: _Stream) -> None:
        self.rows(part, _attention_of_rows(spec, stream.plan), stream.rows_of_length)


@dataclass(frozen=True, kw_only=True)
class _Stream:
    """One stream of one batch: its plan, rows by their number of tokens, and rows, events and tokens in all."""

    plan: StreamPlan
    rows_of_length: dict[int, int]
    rows: int
    events: int
    tokens: int


class _FlopsOfLength(dict[int, tuple[int, int]]):
    """Tokens of a row -> (forward, backward) FLOPs of one attention over it, counted when first asked for.

    One such table a call: a step looks up thousands of lengths, and hashing spec and plan for each costs more host time
    than a GPU needs for a layer.
    """

    def __init__(self, count: Callable[[int], AttentionCount]) -> None:
        super().__init__()
        self._count = count

    def __missing__(self, length: int) -> tuple[int, int]:
        found = self._count(length)
        self[length] = found.forward_flops, found.backward_flops
        return self[length]


@lru_cache(maxsize=1000)
def _attention_of_rows(spec: AttentionSpec, plan: StreamPlan) -> _FlopsOfLength:
    """One attention over the tokens of a row."""
    own = plan.config
    return _FlopsOfLength(
        lambda length: count_attention(
            spec,
            q_lengths=[own.seeds if spec.query == "broadcast" else length],
            k_lengths=[own.weight_tokens if spec.query == "cross" else length],
            num_targets=[plan.targets] if spec.mask.targets else None,
            num_context=[plan.context] if spec.mask.context else None,
            heads=own.heads,
            qk_dim=own.dim // own.heads,
        )
    )


@lru_cache(maxsize=1000)
def _read_of_rows(plan: StreamPlan, width: int) -> _FlopsOfLength:
    """The target read of a row of so many tokens, of which its events are read."""
    spec, heads = read_spec(plan, width), len(plan.matched)
    return _FlopsOfLength(
        lambda length: count_attention(spec, q_lengths=[1], k_lengths=[length - plan.extra], heads=heads, qk_dim=width)
    )


def _count(
    config: ModelConfig, schema: Schema, lengths: Mapping[str, Sequence[int] | Tensor], rows: int | None
) -> _Tally:
    plan = plan_model(schema, config)
    missing = [stream.name for stream in plan.streams if stream.name not in lengths]
    if missing:
        raise ValueError(f"lengths of streams {missing} are missing, got {sorted(lengths)}")
    streams = [_stream(stream, lengths[stream.name]) for stream in plan.streams]
    sizes = {stream.plan.name: stream.rows for stream in streams} | ({} if rows is None else {"rows": rows})
    if len(set(sizes.values())) != 1:
        raise ValueError(f"every stream needs one length a row (rows= where there is no stream), got {sizes}")
    batch = next(iter(sizes.values()))
    tally = _Tally()
    _count_tokens(tally, plan, config, streams, batch)
    for index in range(config.layers):
        for stream in streams:
            _count_stream_layer(tally, plan, config, stream, index)
        tokens_in = plan.tokens_in[index] + plan.summary_tokens
        tally.add("interaction", _interaction_flops(tokens_in, config, batch))
    for stream in streams:
        if stream.plan.pools_last(config.layers):
            _count_summary(tally, config, stream)
    width = (plan.tokens_in[-1] + plan.summary_tokens) * config.dim
    tally.add("heads", heads_flops(width, len(plan.tasks), config.heads, batch))
    return tally


def _stream(plan: StreamPlan, lengths: Sequence[int] | Tensor) -> _Stream:
    counts = torch.as_tensor(lengths, dtype=torch.int64).tolist()
    events, rows, extra = sum(counts), len(counts), plan.extra
    return _Stream(
        plan=plan,
        rows_of_length={count + extra: rows for count, rows in Counter(counts).items()},
        rows=rows,
        events=events,
        tokens=events + extra * rows,
    )


def _count_tokens(tally: _Tally, plan: ModelPlan, config: ModelConfig, streams: list[_Stream], rows: int) -> None:
    tally.add("interaction", 2 * rows * len(plan.features) * config.table_dim * config.dim)
    widths = (plan.dense, *config.dense_hidden, config.dense_tokens * config.dim)
    tally.add("interaction", mlp_flops(widths[:2], rows), of_data=True)
    tally.add("interaction", mlp_flops(widths[1:], rows))
    for stream in streams:
        own = stream.plan
        vectors = stream.events + own.targets * rows
        tally.add("sequence", 2 * vectors * len(own.fields) * config.table_dim * own.config.dim)
        tally.add("sequence", 2 * stream.events * (own.action_bits + 2) * own.config.dim, of_data=True)
        _count_feature_summary(tally, plan.tokens_in[0], own.context, own, config, rows)
        if own.read_tokens:
            _count_read(tally, config, stream)


def _count_read(tally: _Tally, config: ModelConfig, stream: _Stream) -> None:
    dim, width, fields = stream.plan.config.dim, config.table_dim, len(stream.plan.matched)
    match = stream.events * fields * width * width
    value = stream.events * dim * (dim + fields * width)
    tally.add("cross", 2 * (match + value + stream.rows * fields * width * config.dim))
    tally.rows("cross", _read_of_rows(stream.plan, width), stream.rows_of_length)


def _count_feature_summary(
    tally: _Tally, tokens_in: int, tokens_out: int, plan: StreamPlan, config: ModelConfig, rows: int
) -> None:
    own = plan.config
    mix = tokens_in * tokens_out * config.dim
    tally.add("cross", 2 * rows * (mix + tokens_out * own.dim * (config.dim + own.dim)))


def _count_stream_layer(tally: _Tally, plan: ModelPlan, config: ModelConfig, stream: _Stream, index: int) -> None:
    own = stream.plan.config
    if stream.plan.refreshes(index):
        _count_summary(tally, config, stream)
    if index >= len(own.blocks):
        return
    kind, square = own.blocks[index], own.dim * own.dim
    if kind == "hstu":
        tally.add("sequence", 2 * stream.tokens * 5 * square)
        tally.attention("sequence", hstu_spec(stream.plan), stream)
    if kind in ("pffn", "interformer"):
        _count_feature_summary(tally, plan.tokens_in[index], own.weight_tokens, stream.plan, config, stream.rows)
        tally.add("sequence", 2 * stream.rows * own.weight_tokens * 2 * square)
        tally.attention("sequence", pffn_spec(stream.plan), stream)
    if kind in ("window", "interformer"):
        tally.add("sequence", 2 * stream.tokens * 4 * square)
        tally.attention("sequence", self_attention_spec(stream.plan), stream)


def _count_summary(tally: _Tally, config: ModelConfig, stream: _Stream) -> None:
    own, rows = stream.plan.config, stream.rows
    square = own.dim * own.dim
    tally.add("cross", 2 * square * (own.seeds + 2 * stream.tokens + rows * own.seeds))
    tally.attention("cross", pooling_spec(stream.plan), stream)
    tokens = stream.plan.summary_tokens
    if own.summary == "hsp":
        terms = rows * own.summary_tokens * own.kron_terms * (own.seeds * own.dim + square)
        tally.add("cross", 2 * terms)
    else:
        tally.add("cross", 2 * rows * tokens * square)
    tally.add("cross", 2 * rows * tokens * own.dim * config.dim)


def _interaction_flops(tokens_in: int, config: ModelConfig, rows: int) -> int:
    own = config.interaction
    if own.kind == "wukong":
        return wukong_flops(tokens_in, own.fm_tokens, own.linear_tokens, config, rows)
    if own.kind == "dhen":
        return dhen_flops(tokens_in, config, rows)
    return experts_flops(tokens_in, own, config, rows)
