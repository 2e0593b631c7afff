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
    config: ModelConfig,
    schema: Schema,
    lengths: Mapping[str, Sequence[int] | Tensor],
    *,
    rows: int | None = None,
    impressions: Sequence[int] | Tensor | None = None,
) -> dict[str, int]:
    """Forward FLOPs of one batch by part. lengths: stream -> events of each row; rows only where there is no stream;
    impressions: of each row, where rows are requests.

    Example: one stream of width d = 8 with rows of 3 and 5 events and a candidate has 10 tokens; its HSTU block's two
    linear layers cost 2 * 10 * (4 * 64 + 64) = 6,400, its causal attention 2 * 2 * 8 * (10 + 21) = 992.
    """
    return _count(config, schema, lengths, rows, impressions).forward


def training_flops(
    config: ModelConfig,
    schema: Schema,
    lengths: Mapping[str, Sequence[int] | Tensor],
    *,
    rows: int | None = None,
    impressions: Sequence[int] | Tensor | None = None,
) -> dict[str, int]:
    """Forward and backward FLOPs of one batch by part; see model_flops."""
    tally = _count(config, schema, lengths, rows, impressions)
    return {part: tally.forward[part] + tally.backward[part] for part in PARTS}


@dataclass(frozen=True, kw_only=True)
class _Tally:
    forward: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    backward: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def add(self, part: str, flops: int, *, of_data: bool = False) -> None:
        """A product of which both factors take gradients, or one (`of_data`)."""
        self.forward[part] += flops
        self.backward[part] += flops if of_data else 2 * flops

    def rows(self, part: str, flops: _FlopsOfLength, rows_of_length: Mapping[_Length, int]) -> None:
        """One call over a stream's rows; rows of equal length are counted together."""
        for length, rows in rows_of_length.items():
            forward, backward = flops[length]
            self.forward[part] += rows * forward
            self.backward[part] += rows * backward

    def attention(self, part: str, spec: AttentionSpec, stream: _Stream) -> None:
        self.rows(part, _attention_of_rows(spec, stream.plan), stream.rows_of_length)


@dataclass(frozen=True, kw_only=True)
class _Stream:
    """One stream of one batch: its plan, rows by number of tokens and targets, and rows, events and tokens in all.

    pooled: rows of its summaries, an impression each where there is a candidate; joined: whether seeds pool the events
    of a request once, and candidates join (requests.py)
    """

    plan: StreamPlan
    rows_of_length: dict[_Length, int]
    rows: int
    events: int
    tokens: int
    pooled: int
    joined: bool


_Length = tuple[int, int]
"""Tokens of a row, and how many of them are targets."""


class _FlopsOfLength(dict[_Length, tuple[int, int]]):
    """Tokens and targets of a row -> (forward, backward) FLOPs of one attention over it, counted when first asked for.

    One such table a call: a step looks up thousands of lengths, and hashing spec and plan for each costs more host time
    than a GPU needs for a layer.
    """

    def __init__(self, count: Callable[[_Length], AttentionCount]) -> None:
        super().__init__()
        self._count = count

    def __missing__(self, length: _Length) -> tuple[int, int]:
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
            q_lengths=[own.seeds if spec.query == "broadcast" else length[0]],
            k_lengths=[own.weight_tokens if spec.query == "cross" else length[0]],
            num_targets=[length[1]] if spec.mask.targets else None,
            num_context=[plan.context] if spec.mask.context else None,
            heads=own.heads,
            qk_dim=own.dim // own.heads,
        )
    )


@lru_cache(maxsize=1000)
def _read_of_rows(plan: StreamPlan, width: int) -> _FlopsOfLength:
    """The target reads of a row of so many tokens, of which its events are read by each target."""
    spec, heads = read_spec(plan, width), len(plan.matched)
    return _FlopsOfLength(
        lambda length: count_attention(
            spec,
            q_lengths=[length[1]],
            k_lengths=[length[0] - plan.context - length[1]],
            heads=heads,
            qk_dim=width,
        )
    )


@lru_cache(maxsize=1000)
def _pooling_of_events(plan: StreamPlan) -> _FlopsOfLength:
    """Seeds over the events of a shared row, without its targets."""
    own = plan.config
    return _FlopsOfLength(
        lambda length: count_attention(
            pooling_spec(plan),
            q_lengths=[own.seeds],
            k_lengths=[length[0] - length[1]],
            heads=own.heads,
            qk_dim=own.dim // own.heads,
        )
    )


def _count(
    config: ModelConfig,
    schema: Schema,
    lengths: Mapping[str, Sequence[int] | Tensor],
    rows: int | None,
    impressions: Sequence[int] | Tensor | None,
) -> _Tally:
    plan = plan_model(schema, config)
    missing = [stream.name for stream in plan.streams if stream.name not in lengths]
    if missing:
        raise ValueError(f"lengths of streams {missing} are missing, got {sorted(lengths)}")
    sizes = {stream.name: len(lengths[stream.name]) for stream in plan.streams} | (
        {} if rows is None else {"rows": rows}
    )
    counts = None if impressions is None else torch.as_tensor(impressions, dtype=torch.int64).tolist()
    if counts is not None:
        sizes["impressions"] = len(counts)
    if len(set(sizes.values())) != 1:
        raise ValueError(f"every stream needs one length a row (rows= where there is no stream), got {sizes}")
    rows = next(iter(sizes.values()))
    batch = rows if counts is None else sum(counts)
    streams = [_stream(stream, lengths[stream.name], counts) for stream in plan.streams]
    tally = _Tally()
    _count_tokens(tally, plan, config, streams, rows=rows, impressions=batch)
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


def _stream(plan: StreamPlan, lengths: Sequence[int] | Tensor, impressions: list[int] | None) -> _Stream:
    """impressions: of each row, where rows are requests: a shared row has the targets of all, else each has the row."""
    counts, extra, targets = torch.as_tensor(lengths, dtype=torch.int64).tolist(), plan.extra, plan.targets
    if impressions is not None and not plan.shared:
        counts = [count for count, times in zip(counts, impressions, strict=True) for _ in range(times)]
    if impressions is None or not plan.shared:
        found = {(count + extra, targets): rows for count, rows in Counter(counts).items()}
        pooled = len(counts)
    else:
        pairs = zip(counts, impressions, strict=True)
        found = dict(Counter((count + targets * times, targets * times) for count, times in pairs))
        pooled = sum(impressions) if targets else len(counts)
    events, rows = sum(counts), len(counts)
    return _Stream(
        plan=plan,
        rows_of_length=found,
        rows=rows,
        events=events,
        tokens=events + (plan.context * rows) + targets * pooled,
        pooled=pooled,
        joined=impressions is not None and plan.shared and targets > 0,
    )


def _count_tokens(
    tally: _Tally, plan: ModelPlan, config: ModelConfig, streams: list[_Stream], *, rows: int, impressions: int
) -> None:
    """rows: of the data; impressions: samples, of which a request has several."""
    once = len(plan.request_features)
    vectors = rows * once + impressions * (len(plan.features) - once)
    tally.add("interaction", 2 * vectors * config.table_dim * config.dim)
    rows = impressions
    widths = (plan.dense, *config.dense_hidden, config.dense_tokens * config.dim)
    tally.add("interaction", mlp_flops(widths[:2], rows), of_data=True)
    tally.add("interaction", mlp_flops(widths[1:], rows))
    for stream in streams:
        own = stream.plan
        vectors = stream.events + own.targets * stream.pooled
        tally.add("sequence", 2 * vectors * len(own.fields) * config.table_dim * own.config.dim)
        tally.add("sequence", 2 * stream.events * (own.action_bits + 2) * own.config.dim, of_data=True)
        _count_feature_summary(tally, plan.tokens_in[0], own.context, own, config, rows)
        if own.read_tokens:
            _count_read(tally, config, stream)


def _count_read(tally: _Tally, config: ModelConfig, stream: _Stream) -> None:
    dim, width, fields = stream.plan.config.dim, config.table_dim, len(stream.plan.matched)
    match = stream.events * fields * width * width
    value = stream.events * dim * (dim + fields * width)
    tally.add("cross", 2 * (match + value + stream.pooled * fields * width * config.dim))
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
    own, rows = stream.plan.config, stream.pooled
    square = own.dim * own.dim
    tally.add("cross", 2 * square * (own.seeds + 2 * stream.tokens + rows * own.seeds))
    if stream.joined:
        tally.rows("cross", _pooling_of_events(stream.plan), stream.rows_of_length)
        # scores once more, for the weight that each impression's candidate has beside the events
        tally.add("cross", 2 * stream.tokens * own.seeds * own.dim)
    else:
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
