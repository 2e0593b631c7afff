"""Base-batch shuffling in plain Python, one row at a time: what balance.base_batch_order and cost.py are compared with.

Shares nothing with them but the rules in their docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gem_data.interface import CostModel, CostTerm, LoaderConfig, Schema


def reference_pairs(term: CostTerm, events: int) -> float:
    """Tokens or pairs of one row, counted one query at a time."""
    tokens = events + term.extra
    if not term.pairs:
        return tokens
    count = 0
    for query in range(tokens):
        for key in range(tokens):
            seen = key <= query if term.causal else True
            # A causal window of w holds the token itself and the w - 1 before it; one both ways, w on either side.
            near = not term.window or (query - key < term.window if term.causal else abs(query - key) <= term.window)
            count += seen and near
    return count


def reference_load(schema: Schema, row: Mapping[str, Any], model: CostModel | None, max_length: int | None) -> float:
    """Load of one row given as {column: value}."""
    events = {}
    for stream in schema.streams:
        length = len(row[f"stream.{stream.name}.time"])
        limit = stream.max_length if max_length is None else min(stream.max_length, max_length)
        events[stream.name] = min(length, limit)
    if model is None:
        return float(sum(events.values()))
    count = len(row["sample_id"]) if schema.impression else 1
    total = model.per_sample + model.per_impression * (count - 1)
    for term in model.terms:
        pairs = reference_pairs(term, events[term.stream])
        if term.repeated:
            pairs *= count
        else:
            # Further candidates meet what the last token meets, or are one token each.
            seen = pairs - reference_pairs(term, events[term.stream] - 1) if term.pairs else 1
            pairs += term.targets * (count - 1) * seen
        total += term.coefficient * pairs
    return total


def reference_base_order(
    loads: Sequence[float],
    config: LoaderConfig,
    *,
    first: int,
    permute: Callable[[int, int], list[int]],
) -> list[int]:
    """New order of a window's rows. permute(count, start) is the seeded permutation of a pool's shares."""
    assert config.base_batch is not None
    base, share = config.base_batch, config.global_batch_size // config.logical_shards
    head = 0
    while head < len(loads) and (first + head) % share:
        head += 1
    tail = (len(loads) - head) % share
    by_load = sorted(range(len(loads)), key=lambda row: (-loads[row], row))
    size = head + tail
    sample = [by_load[(2 * i + 1) * len(loads) // (2 * size)] for i in range(size)]
    to_head = {(2 * i + 1) * size // (2 * head) for i in range(head)}
    front = [row for place, row in enumerate(sample) if place in to_head]
    back = [row for place, row in enumerate(sample) if place not in to_head]
    rest = [row for row in range(len(loads)) if row not in set(sample)]
    blocks = [rest[start : start + base] for start in range(0, len(rest), base)]
    weights = [sum(loads[row] for row in block) for block in blocks]
    per_share = share // base
    pool = max(config.base_pool // per_share, 1) * per_share
    middle: list[int] = []
    for start in range(0, len(blocks), pool):
        numbers = sorted(range(start, min(start + pool, len(blocks))), key=lambda block: (-weights[block], block))
        shares = len(numbers) // per_share
        members: list[list[int]] = [[] for _ in range(shares)]
        for layer in range(per_share):
            layer_blocks = numbers[layer * shares : (layer + 1) * shares]
            lightest = sorted(range(shares), key=lambda s: (sum(weights[b] for b in members[s]), s))
            for place, block in zip(lightest, layer_blocks, strict=True):
                members[place].append(block)
        for place in permute(shares, start):
            for block in members[place]:
                middle += blocks[block]
    return front + middle + back
