"""Shapes of a model, worked out once from schema and config: build.py makes modules of them, flops.py counts them.

Tokens of the interaction, layer by layer: the feature tokens (one per scalar and list feature, `dense_tokens` for the
dense features and the streams' lengths and ages) and each stream's summary tokens go in; the interaction's come out.
"""

from __future__ import annotations

from dataclasses import dataclass

from gem_data.interface import Schema, StreamInfo

from gem_pipelines.model.config import ModelConfig, StreamConfig


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """One stream: feature keys of its fields, and the scalar that says the same of the candidate (None: unknown).

    shared: rows are requests, whose impressions share the stream.

    Example: fields ("clicks.item", "clicks.shop"), candidate ("item", None): the candidate's token is made of the
    scalar "item", by the same projection as the events' items.
    """

    name: str
    config: StreamConfig
    fields: tuple[str, ...]
    candidate: tuple[str | None, ...]
    action_bits: int
    max_length: int
    shared: bool = False

    @property
    def context(self) -> int:
        """Tokens before the events."""
        return self.config.cls_tokens

    @property
    def targets(self) -> int:
        """Tokens after the events: 1 with a candidate."""
        return int(any(scalar is not None for scalar in self.candidate))

    @property
    def extra(self) -> int:
        """Tokens of a row without events."""
        return self.context + self.targets

    @property
    def summary_tokens(self) -> int:
        """Tokens that the interaction sees of this stream."""
        if self.config.summary == "hsp":
            return self.config.summary_tokens + self.targets
        return self.context + self.config.seeds + self.config.recent_tokens + self.targets

    @property
    def matched(self) -> tuple[tuple[str, str], ...]:
        """(field of the events, scalar of the candidate) of every table that both use."""
        pairs = zip(self.fields, self.candidate, strict=True)
        return tuple((field, scalar) for field, scalar in pairs if scalar is not None)

    @property
    def read_tokens(self) -> int:
        """1 where the candidate reads the stream by itself (target_read.py)."""
        return int(self.config.target_read and self.targets > 0)

    @property
    def divisor(self) -> float:
        """What scores or sums over events are divided by: a constant of the run."""
        return self.config.score_divisor or float(self.max_length + self.extra)

    def refreshes(self, layer: int) -> bool:
        """Whether layer `layer` pools a new summary (CompSkip: not in front of a "window" block, but at first)."""
        kinds = self.config.blocks
        if layer >= len(kinds):
            return layer == len(kinds)
        return layer == 0 or kinds[layer] != "window" or not self.config.skip

    def pools_last(self, layers: int) -> bool:
        """Whether the heads need a summary of their own: after the last block, unless some layer has pooled since."""
        return len(self.config.blocks) == layers


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The whole model. `tokens_in[l]` feature tokens enter layer l (without summaries); the last entry leaves.

    request_features: those of `features` that stand once in a request.
    """

    features: tuple[str, ...]
    dense: int
    streams: tuple[StreamPlan, ...]
    tokens_in: tuple[int, ...]
    tasks: tuple[str, ...]
    request_features: tuple[str, ...] = ()

    @property
    def summary_tokens(self) -> int:
        """Tokens that the interaction sees of all streams."""
        return sum(stream.summary_tokens + stream.read_tokens for stream in self.streams)


def plan_model(schema: Schema, config: ModelConfig) -> ModelPlan:
    """Raises ValueError where config and schema do not fit."""
    names = [stream.name for stream in schema.streams]
    unknown = [name for name in config.streams if name not in names]
    if unknown:
        raise ValueError(f"model.streams names {unknown}, but the data has the streams {names}")
    features = tuple(feature.name for feature in (*schema.scalars, *schema.lists))
    dense = len(schema.dense) + 2 * len(names)
    first = len(features) + (config.dense_tokens if dense else 0)
    if first == 0:
        raise ValueError("the data has neither scalar, list or dense features nor streams: nothing to learn from")
    return ModelPlan(
        features=features,
        dense=dense,
        streams=tuple(_plan_stream(schema, stream, config.stream_for(stream.name)) for stream in schema.streams),
        tokens_in=(first, *[config.interaction.tokens] * config.layers),
        tasks=tuple(label.name for label in schema.labels),
        request_features=tuple(name for name in features if name in schema.request_keys()),
    )


def _plan_stream(schema: Schema, stream: StreamInfo, config: StreamConfig) -> StreamPlan:
    scalar_of: dict[str, str] = {}
    for scalar in schema.scalars:
        scalar_of.setdefault(scalar.table, scalar.name)
    candidate = tuple(scalar_of.get(f.table) if config.candidate else None for f in stream.fields)
    plan = StreamPlan(
        name=stream.name,
        config=config,
        fields=tuple(f"{stream.name}.{f.name}" for f in stream.fields),
        candidate=candidate,
        action_bits=stream.action_bits,
        max_length=stream.max_length,
        shared=bool(schema.impression) and config.per_request,
    )
    if plan.shared:
        _check_shared(plan)
    return plan


def _check_shared(plan: StreamPlan) -> None:
    """Raise ValueError where the events of a stream would depend on the impression that looks at them."""
    kinds = plan.config.blocks
    made = next((kind for kind in kinds if kind in ("pffn", "interformer")), None)
    why = None
    if plan.context:
        why = f"cls_tokens is {plan.context}: context is made from the features of an impression"
    elif made is not None:
        why = f'blocks has "{made}", whose weights are made from the features of an impression'
    elif "window" in kinds and plan.targets:
        why = 'blocks has "window", which looks both ways: events see the candidate'
    if why is not None:
        raise ValueError(
            f"model.stream of stream {plan.name!r}: {why}, so the impressions of a request cannot share its history. "
            'Set per_request False, which computes the stream once an impression, or use "hstu" blocks.'
        )
