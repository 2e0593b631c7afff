"""Rows that are requests: what their impressions share, and what each has of its own.

A request's history is embedded, attended to and pooled once; its impressions' candidates are appended to it, all of
them, as targets: each sees the history and itself, never another, and no event sees a candidate. So the tokens of
events are those that every impression would compute alone, and a row of L events and M candidates costs L (L + 1) / 2 +
M (L + 1) pairs instead of M (L + 1) (L + 2) / 2. What is an impression's own (feature tokens with the candidate's in
them, summaries with the candidate in them, interactions, heads) has B rows; user parts are repeated (`repeat`) at the
last place before, and never as copies of events.

What holds for the sharing to be exact: nothing of an impression may reach an event. Blocks whose weights or context are
made from the features break it, and so do blocks that look both ways past a candidate. plan.py refuses them by name,
and `StreamConfig.per_request = False` computes such a stream once an impression (`expand_stream`), exactly.

Seeds that pool a stream see its events and the candidate. Softmax over both is put together from the two:

    pooled = (1 - w) softmax-mean over events + w v_candidate,     w = sigmoid(score_candidate - logsumexp of events)

so events are pooled once a request; their logsumexp costs one more product of seeds and keys.

Legend: R requests, B impressions, N events, T tokens, S seeds, H heads, K head dim, D width.
"""

from __future__ import annotations

import dataclasses

import torch
from gem_attention.api import make_layout
from gem_attention.rotary import rotary_angles
from torch import Tensor

from gem_pipelines.model.inputs import ModelInput, Requests, StreamInput
from gem_pipelines.model.plan import StreamPlan
from gem_pipelines.model.repeat import of_impressions, repeat, stream_timestamps
from gem_pipelines.model.tokens import Packed, pack, rotary_spec


def view_of_stream(inputs: ModelInput, plan: StreamPlan) -> ModelInput:
    """What the parts of one stream see: `inputs`, or the stream once an impression where it is not shared."""
    if inputs.requests is None or plan.shared:
        return inputs
    return expand_stream(inputs, plan)


def expand_stream(inputs: ModelInput, plan: StreamPlan) -> ModelInput:
    """Plain inputs of B rows with this stream and its candidates alone: events repeated for each impression."""
    requests, stream = inputs.requests, inputs.streams[plan.name]
    assert requests is not None
    lengths_B = stream.offsets.diff()[requests.owner]
    offsets = torch.cat([stream.offsets[:1], lengths_B.cumsum(0)])
    total = int(offsets[-1])
    shift_B = stream.offsets[:-1][requests.owner] - offsets[:-1]
    event_M = torch.repeat_interleave(shift_B, lengths_B, output_size=total)
    event_M = event_M + torch.arange(total, device=event_M.device)
    embeddings = {field: inputs.embeddings[field][event_M] for field in plan.fields}
    embeddings |= {name: of_impressions(inputs, name) for name in plan.candidate if name is not None}
    own = StreamInput(
        offsets=offsets, actions=stream.actions[event_M], times=stream.times[event_M], max_len=stream.max_len
    )
    return dataclasses.replace(inputs, embeddings=embeddings, streams={plan.name: own}, requests=None)


def pack_view(plan: StreamPlan, view: ModelInput, *, dtype: torch.dtype) -> Packed:
    """`Packed` of what the parts of a stream see."""
    stream = view.streams[plan.name]
    if view.requests is None:
        return pack(plan, stream, view.timestamps, dtype=dtype)
    return pack_requests(plan, stream, stream_timestamps(view), view.requests, dtype=dtype)


def pack_requests(
    plan: StreamPlan, stream: StreamInput, timestamps_R: Tensor, requests: Requests, *, dtype: torch.dtype
) -> Packed:
    """`tokens.pack` of a shared stream: a row is [events | candidates of its impressions], which stand at one position.

    Requests of 2 and 1 impressions, rows of 2 and 0 events, R = 1: offsets [0, 4, 5], order [0, 1, 2, 3, 4] (events are
    rows 0 and 1, candidates 2 to 4), events [0, 1], target [2, 3, 4], recent [[1], [1], [4]], is_recent yes, yes, no.
    """
    rows, events, count = stream.offsets.shape[0] - 1, stream.actions.shape[0], requests.owner.shape[0]
    device, m = stream.offsets.device, plan.targets
    offsets = stream.offsets + m * requests.offsets
    total, longest = events + m * count, stream.max_len + m * requests.most if rows else 0
    lengths_R = stream.offsets.diff()
    row_N = torch.repeat_interleave(lengths_R, output_size=events)
    event_N = torch.arange(events, device=device) + m * requests.offsets[row_N]
    target_B = stream.offsets[1:][requests.owner] + torch.arange(count, device=device)
    order_T = torch.empty(total, dtype=torch.int64, device=device)
    order_T[torch.cat([event_N, target_B]) if m else event_N] = torch.arange(total, device=device)
    end_R1 = (stream.offsets[1:] + m * requests.offsets[:-1])[:, None]
    recent = end_R1 - 1 - torch.arange(plan.config.recent_tokens, device=device)
    is_recent = recent >= offsets[:-1, None]
    recent = torch.where(is_recent, recent, offsets[1:, None] - 1).clamp(min=0)
    if m:
        recent, is_recent = recent[requests.owner], is_recent[requests.owner]
    size = {"q_offsets": offsets, "max_q_len": longest, "total_q": total, "check_values": False}
    angles = None
    if plan.config.rotary:
        position_N = torch.arange(events, device=device) - stream.offsets[row_N]
        age_N = (timestamps_R[row_N] - stream.times).clamp(min=0)
        position_T, age_T = position_N, age_N
        if m:
            position_T = torch.cat([position_N, lengths_R[requests.owner]])[order_T]
            age_T = torch.cat([age_N, age_N.new_zeros(count)])[order_T]
        head_dim = plan.config.dim // plan.config.heads
        angles = rotary_angles(rotary_spec(plan), position_T, age_T, dim=head_dim, dtype=dtype)
    return Packed(
        offsets=offsets,
        order=order_T,
        events=event_N,
        masked=make_layout(**size, num_targets=requests.offsets.diff() if m else None),
        plain=make_layout(**size),
        pooled=make_layout(k_offsets=stream.offsets, max_k_len=stream.max_len, total_k=events, check_values=False),
        weighted=None,
        target=target_B,
        recent=recent,
        is_recent=is_recent,
        angles=angles,
        requests=requests,
    )


def with_candidate(
    pooled_RSHK: Tensor,
    q_SHK: Tensor,
    k_NHK: Tensor,
    *,
    candidate_k_BHK: Tensor,
    candidate_v_BHK: Tensor,
    scale: float,
    offsets: Tensor,
    requests: Requests,
) -> Tensor:
    """Softmax pooling over a request's events, and one candidate more for each impression: (B, S, H, K).

    offsets: (R + 1,) of the events. Scores are in float32 at least. One event of score 0 and value 2, a candidate of
    score log 3 and value 10: weights 1/4 and 3/4, 8.
    """
    wide = torch.promote_types(k_NHK.dtype, torch.float32)
    q = q_SHK.to(wide) * scale
    score_NSH = torch.einsum("nhk,shk->nsh", k_NHK.to(wide), q)
    score_BSH = torch.einsum("bhk,shk->bsh", candidate_k_BHK.to(wide), q)
    level_RSH = _logsumexp(score_NSH, offsets)
    weight_BSH1 = torch.sigmoid(score_BSH - repeat(level_RSH, requests))[..., None].to(pooled_RSHK.dtype)
    return (1 - weight_BSH1) * repeat(pooled_RSHK, requests) + weight_BSH1 * candidate_v_BHK[:, None]


def _logsumexp(score_NSH: Tensor, offsets: Tensor) -> Tensor:
    """(R, S, H) over the events of every row; minus infinity, without gradient, where there are none."""
    rows, shape = offsets.shape[0] - 1, score_NSH.shape[1:]
    present_R1 = offsets.diff()[:, None] > 0
    flat_NC = score_NSH.flatten(1)
    if not flat_NC.shape[0]:
        return score_NSH.new_full((rows, *shape), -torch.inf)
    top_RC = torch.segment_reduce(flat_NC.detach(), "max", offsets=offsets, axis=0, unsafe=True)
    top_RC = torch.where(present_R1, top_RC, 0.0)
    row_N = torch.repeat_interleave(offsets.diff(), output_size=flat_NC.shape[0])
    sum_RC = torch.segment_reduce((flat_NC - top_RC[row_N]).exp(), "sum", offsets=offsets, axis=0, unsafe=True)
    level_RC = torch.where(present_R1, top_RC + torch.where(present_R1, sum_RC, 1.0).log(), -torch.inf)
    return level_RC.unflatten(1, shape)
