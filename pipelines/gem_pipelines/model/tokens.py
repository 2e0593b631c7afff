"""From embedded features to tokens: one token per feature for the interaction, one per event for each stream.

An event's vector is the sum of projections of its fields' embeddings, of its action bits and of its time gaps (adding
instead of interleaving halves the length). The candidate, appended as the last token of every stream whose tables it
shares, goes through the same projections, so that what differs between a past item and the item now in question is
one learned vector. Reference times are the rows' own timestamps.

Letters: B rows, N events of a stream, T tokens of a stream, F features, E table width, D token width, A action bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gem_attention.api import make_layout
from gem_attention.block_api import rotary_table
from gem_attention.interface import Layout, RotarySpec
from gem_attention.rotary import apply_rotary, rotary_angles
from torch import Tensor, nn

from gem_pipelines.model.common import Mlp, linear, to_compute
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.inputs import ModelInput, Requests, StreamInput
from gem_pipelines.model.plan import ModelPlan, StreamPlan
from gem_pipelines.model.repeat import of_impressions, repeat, stream_timestamps

ROTARY_PAIRING = "halves"


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """What all layers share about one stream of one batch; a row is [context | events | target].

    offsets       (B + 1,) int64 of the packed tokens
    order         (T,) int64: token t is row order[t] of cat([context, events, targets])
    events        (N,) positions of the events among the packed tokens
    masked, plain layouts of self-attention, with and without targets and context
    pooled        layout of seeds that look at the tokens
    weighted      layout of tokens that look at `weight_tokens` tokens a row
    target        (B,) position of the target
    requests      whose impressions are whose, where rows are requests sharing the stream (requests.py): `target` and,
                  with a candidate, `recent` have a row an impression, `pooled` is of events alone, `weighted` None
    recent        (B, R) positions of the latest events, latest first; is_recent says which exist
    angles        (T, head dim / 2) rotary angles, or None
    table, turn   their cosines and sines, worked out once a batch: as `gem_attention.block_api` takes them, or as
                  `split_and_turn` does; or None

    Example, one context token, one target, rows of 2 and 0 events, R = 1: offsets [0, 4, 6], order
    [0, 2, 3, 4, 1, 5] (contexts are rows 0 and 1, events 2 and 3, targets 4 and 5), events [1, 2],
    target [3, 5], recent [[2], [5]] with is_recent [[True], [False]].
    """

    offsets: Tensor
    order: Tensor
    events: Tensor
    masked: Layout
    plain: Layout
    pooled: Layout
    weighted: Layout | None
    target: Tensor
    recent: Tensor
    is_recent: Tensor
    angles: Tensor | None
    table: Tensor | None = None
    turn: tuple[Tensor, Tensor] | None = None
    requests: Requests | None = None


def with_table(packed: Packed, *, fused: bool) -> Packed:
    """The same with `table`, for fused blocks, or `turn`, for others."""
    if packed.angles is None:
        return packed
    if fused:
        return dataclasses.replace(packed, table=rotary_table(packed.angles))
    assert ROTARY_PAIRING == "halves"
    cos_TK, sin_TK = packed.angles.cos(), packed.angles.sin()
    turn = (torch.cat([cos_TK, cos_TK], -1)[:, None], torch.cat([-sin_TK, sin_TK], -1)[:, None])
    return dataclasses.replace(packed, turn=turn)


def rotary_spec(plan: StreamPlan) -> RotarySpec:
    """The stream's rotary embedding: positions and log ages."""
    return RotarySpec(pairing=ROTARY_PAIRING, time_scale_s=plan.config.rotary_time_scale_s)


def pack(plan: StreamPlan, stream: StreamInput, timestamps_B: Tensor, *, dtype: torch.dtype) -> Packed:
    """Everything the layers need to know of the batch's lengths and times; computed once, without a wait."""
    rows, events = stream.offsets.shape[0] - 1, stream.actions.shape[0]
    device = stream.offsets.device
    c, m = plan.context, plan.targets
    offsets = stream.offsets
    if c + m:
        offsets = offsets + torch.arange(0, (c + m) * (rows + 1), c + m, device=device)
    total, longest = events + (c + m) * rows, stream.max_len + c + m if rows else 0
    row_N = torch.repeat_interleave(stream.offsets.diff(), output_size=events)
    event_N = torch.add(torch.arange(c, c + events, device=device), row_N, alpha=c + m)
    last_B, first_B1 = offsets[1:] - 1, offsets[:-1, None]
    places = [(first_B1 + torch.arange(c, device=device)).flatten()] if c else []
    places += [event_N, last_B] if m else [event_N]
    order_T = torch.empty(total, dtype=torch.int64, device=device)
    order_T[torch.cat(places)] = torch.arange(total, device=device)
    recent_BR = offsets[1:, None] - torch.arange(m + 1, m + 1 + plan.config.recent_tokens, device=device)
    is_recent_BR = recent_BR >= (first_B1 + c if c else first_B1)
    size = {"q_offsets": offsets, "max_q_len": longest, "total_q": total, "check_values": False}
    counts = {
        "num_targets": torch.full((rows,), m, device=device) if m else None,
        "num_context": torch.full((rows,), c, device=device) if c else None,
    }
    width = plan.config.weight_tokens
    weights = {
        "k_offsets": torch.arange(0, width * (rows + 1), width, device=device),
        "max_k_len": width,
        "total_k": width * rows,
    }
    angles_TK = None
    if plan.config.rotary:
        angles_TK = _angles(plan, stream, timestamps_B, offsets, order_T=order_T, row_N=row_N, dtype=dtype)
    return Packed(
        offsets=offsets,
        order=order_T,
        events=event_N,
        masked=make_layout(**size, **counts),
        plain=make_layout(**size),
        pooled=make_layout(k_offsets=offsets, max_k_len=longest, total_k=total, check_values=False),
        weighted=make_layout(**size, **weights),
        target=last_B,
        recent=torch.where(is_recent_BR, recent_BR, last_B[:, None]).clamp(min=0),
        is_recent=is_recent_BR,
        angles=angles_TK,
    )


def _angles(
    plan: StreamPlan,
    stream: StreamInput,
    timestamps_B: Tensor,
    offsets: Tensor,
    *,
    order_T: Tensor,
    row_N: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    age_N = (timestamps_B[row_N] - stream.times).clamp(min=0)
    rows = timestamps_B.shape[0]
    age_T = torch.cat([age_N.new_zeros(plan.context * rows), age_N, age_N.new_zeros(plan.targets * rows)])[order_T]
    total = order_T.shape[0]
    start_T = torch.repeat_interleave(offsets[:-1], offsets.diff(), output_size=total)
    position_T = torch.arange(total, device=offsets.device) - start_T
    head_dim = plan.config.dim // plan.config.heads
    return rotary_angles(rotary_spec(plan), position_T, age_T, dim=head_dim, dtype=dtype)


class _Turn(torch.autograd.Function):
    """`gem_attention.rotary.apply_rotary` for pairs of halves, cosines and sines given: 3 launches instead of 10, and
    as many in backward, which turns back. x (T, H, K) of any float dtype, cos and signed sin (T, 1, K): out_i = x_i
    cos_i + x_(i + K/2 mod K) sin_i, worked out in the wider of the dtypes.
    """

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1K, sin_T1K)
        half = x_THK.shape[-1] // 2
        return torch.addcmul(x_THK * cos_T1K, x_THK.roll(half, -1), sin_T1K).to(x_THK.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos_T1K, sin_T1K = ctx.saved_tensors
        half = grad.shape[-1] // 2
        return torch.addcmul((grad * sin_T1K).roll(half, -1), grad, cos_T1K).to(grad.dtype), None, None


def split_and_turn(qk_TD: Tensor, heads: int, packed: Packed, rotary: RotarySpec) -> tuple[Tensor, Tensor]:
    """q and k, (T, H, head dim) each, out of (T, 2 * width), turned together: one pass instead of two."""
    qk_THK = qk_TD.unflatten(-1, (2 * heads, -1))
    if packed.turn is not None:
        qk_THK = _Turn.apply(qk_THK, *packed.turn)  # type: ignore[no-untyped-call]
    elif packed.angles is not None:
        qk_THK = apply_rotary(qk_THK, packed.angles, rotary)
    return qk_THK[:, :heads], qk_THK[:, heads:]


class EventTokens(nn.Module):
    """Events and candidate of one stream as vectors."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        self.plan, self.config = plan, config
        dim = plan.config.dim
        self.fields = linear(len(plan.fields) * config.table_dim, dim)
        self.actions = linear(plan.action_bits, dim) if plan.action_bits else None
        self.gaps = linear(2, dim)
        if plan.targets:
            self.is_candidate_D = nn.Parameter(torch.empty(dim).normal_(std=dim**-0.5))

    def forward(self, inputs: ModelInput) -> tuple[Tensor, Tensor]:
        """(events (N, D), candidates (B, D); the latter (0, D) without a candidate)."""
        stream = inputs.streams[self.plan.name]
        fields_NE = torch.cat([inputs.embeddings[field] for field in self.plan.fields], dim=-1)
        events_ND = self.fields(to_compute(fields_NE, self.config))
        if self.actions is not None:
            bit_A = torch.arange(self.plan.action_bits, device=stream.actions.device)
            events_ND = events_ND + self.actions((stream.actions[:, None] >> bit_A & 1).to(events_ND.dtype))
        gaps_N2 = time_gaps(stream, stream_timestamps(inputs)).to(events_ND.dtype)
        events_ND = events_ND + self.gaps(gaps_N2)
        if not self.plan.targets:
            return events_ND, events_ND.new_zeros(0, events_ND.shape[1])
        known = {name: of_impressions(inputs, name) for name in self.plan.candidate if name is not None}
        zero_BE = torch.zeros_like(next(iter(known.values())))
        parts = [zero_BE if name is None else known[name] for name in self.plan.candidate]
        candidates_BD = self.fields(to_compute(torch.cat(parts, dim=-1), self.config))
        return events_ND, candidates_BD + self.is_candidate_D.to(candidates_BD.dtype)


def time_gaps(stream: StreamInput, timestamps_B: Tensor) -> Tensor:
    """(N, 2) float32: log(1 + seconds) / 10 from the event to its row's time, and from the event before to it.

    The first event of a row has gap 0. Example: row time 100, events at 90 and 99: log(11) / 10, 0 and log(2) / 10,
    log(10) / 10.
    """
    row_N = torch.repeat_interleave(stream.offsets.diff(), output_size=stream.times.shape[0])
    age_N = timestamps_B[row_N] - stream.times
    gap_N = torch.zeros_like(age_N)
    if age_N.shape[0] > 1:
        gap_N[1:] = torch.where(row_N[1:] == row_N[:-1], stream.times[1:] - stream.times[:-1], 0)
    return torch.stack([age_N, gap_N], dim=1).clamp(min=0).float().log1p() / 10


class FeatureTokens(nn.Module):
    """Scalar, list and dense features as tokens (B, tokens, D)."""

    def __init__(self, plan: ModelPlan, config: ModelConfig) -> None:
        super().__init__()
        self.plan, self.config = plan, config
        self._known_places: dict[tuple[torch.device, tuple[str, ...]], Tensor] = {}
        self.dim = config.dim
        count = len(plan.features)
        self.weight_FED = nn.Parameter(torch.empty(count, config.table_dim, config.dim))
        for weight_ED in self.weight_FED:
            nn.init.xavier_uniform_(weight_ED)
        widths = (plan.dense, *config.dense_hidden, config.dense_tokens * config.dim)
        self.dense = Mlp(widths, bias=config.bias) if plan.dense else None

    def forward(self, inputs: ModelInput) -> Tensor:
        tokens = []
        if self.plan.features:
            tokens.append(self._features(inputs))
        if self.dense is not None:
            dense_BF = torch.cat([signed_log(inputs.dense), self._stream_facts(inputs)], dim=1)
            tokens.append(to_compute(self.dense(dense_BF), self.config).unflatten(1, (-1, self.dim)))
        return torch.cat(tokens, dim=1)

    def _features(self, inputs: ModelInput) -> Tensor:
        """(B, F, D); those that stand once in a request are projected once."""
        names, requests = self.plan.features, inputs.requests
        if requests is None:
            return self._project(inputs, names, self.weight_FED)
        once = [name for name in names if name in requests.features]
        own = [name for name in names if name not in requests.features]
        places = self._places([*once, *own], self.weight_FED.device)
        weight_FED = self.weight_FED.index_select(0, places)
        parts = []
        if once:
            parts.append(repeat(self._project(inputs, once, weight_FED[: len(once)]), requests))
        if own:
            parts.append(self._project(inputs, own, weight_FED[len(once) :]))
        return torch.cat(parts, dim=1).index_select(1, self._places(names, self.weight_FED.device, of=[*once, *own]))

    def _places(self, names: Sequence[str], device: torch.device, *, of: Sequence[str] | None = None) -> Tensor:
        """Place of each name among `of` (None: all features); kept, so that the device is told once."""
        key = (device, tuple(names))
        if key not in self._known_places:
            order = list(self.plan.features if of is None else of)
            self._known_places[key] = torch.tensor([order.index(name) for name in names], device=device)
        return self._known_places[key]

    def _project(self, inputs: ModelInput, names: Sequence[str], weight_FED: Tensor) -> Tensor:
        x_FBE = to_compute(torch.stack([inputs.embeddings[name] for name in names]), self.config)
        return torch.bmm(x_FBE, weight_FED.to(x_FBE.dtype)).transpose(0, 1)

    def _stream_facts(self, inputs: ModelInput) -> Tensor:
        """(B, 2 * streams): log length and log age of the latest event, both 0 without events."""
        columns, timestamps = [], stream_timestamps(inputs)
        for stream in self.plan.streams:
            own = inputs.streams[stream.name]
            length_B = own.offsets.diff()
            if own.times.shape[0]:
                latest_B = own.times[(own.offsets[1:] - 1).clamp(min=0)]
                age_B = torch.where(length_B > 0, timestamps - latest_B, 0).clamp(min=0)
            else:
                age_B = torch.zeros_like(length_B)
            columns += [length_B.to(inputs.dense.dtype).log1p(), age_B.to(inputs.dense.dtype).log1p() / 10]
        if not columns:
            return inputs.dense.new_zeros(inputs.dense.shape[0], 0)
        facts = torch.stack(columns, dim=1)
        return facts if inputs.requests is None else repeat(facts, inputs.requests)


def signed_log(x: Tensor) -> Tensor:
    """sign(x) * log(1 + |x|): keeps small values and tames large ones."""
    return x.sign() * x.abs().log1p()
