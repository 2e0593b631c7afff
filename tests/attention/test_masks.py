"""Every mask against a matrix written by hand, and against the prose of MaskSpec, pair by pair."""

import pytest
import torch
from gem_attention.interface import MaskSpec, TimeBuckets
from gem_attention.masks import ranks, sample_mask, time_boundaries, time_buckets


def picture(mask: MaskSpec, length: int, **counts: int) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in sample_mask(mask, length, **counts).tolist()]


CAUSAL = {"causal": True}
TARGETS = {"causal": True, "targets": True}
BOTH = {"causal": True, "targets": True, "context": True}

GOLDEN = {
    "none": (MaskSpec(), 3, {}, ["xxx", "xxx", "xxx"]),
    "causal": (MaskSpec(**CAUSAL), 4, {}, ["x...", "xx..", "xxx.", "xxxx"]),
    "window, both sides": (MaskSpec(window=1), 4, {}, ["xx..", "xxx.", ".xxx", "..xx"]),
    "causal window": (MaskSpec(**CAUSAL, window=2), 5, {}, ["x....", "xx...", "xxx..", ".xxx.", "..xxx"]),
    "last full row": (
        MaskSpec(**CAUSAL, window=1, min_full_rows=1),
        5,
        {},
        ["x....", "xx...", ".xx..", "..xx.", "xxxxx"],
    ),
    "targets skip one another": (
        MaskSpec(**TARGETS),
        5,
        {"num_targets": 2},
        ["x....", "xx...", "xxx..", "xxxx.", "xxx.x"],
    ),
    "targets only": (MaskSpec(**TARGETS), 3, {"num_targets": 3}, ["x..", ".x.", "..x"]),
    "groups of two": (
        MaskSpec(**TARGETS, target_group_size=2, semantics="nvidia"),
        6,
        {"num_targets": 4},
        ["x.....", "xx....", "xxx...", "xxxx..", "xx..x.", "xx..xx"],
    ),
    "groups of two, odd count": (
        MaskSpec(**TARGETS, target_group_size=2, semantics="nvidia"),
        4,
        {"num_targets": 3},
        ["x...", "xx..", "xxx.", "x..x"],
    ),
    "context sees context and history": (
        MaskSpec(causal=True, context=True),
        5,
        {"num_context": 2},
        ["xxxxx", "xxxxx", "xxx..", "xxxx.", "xxxxx"],
    ),
    "context and targets": (
        MaskSpec(**BOTH),
        6,
        {"num_context": 2, "num_targets": 2},
        ["xxxx..", "xxxx..", "xxx...", "xxxx..", "xxxxx.", "xxxx.x"],
    ),
    "context and targets without history": (
        MaskSpec(**BOTH),
        4,
        {"num_context": 2, "num_targets": 2},
        ["xx..", "xx..", "xxx.", "xx.x"],
    ),
    "context only": (MaskSpec(causal=True, context=True), 2, {"num_context": 2}, ["xx", "xx"]),
    "a window hides the context from late rows": (
        MaskSpec(causal=True, context=True, window=2),
        5,
        {"num_context": 1},
        ["xxxxx", "xx...", "xxx..", ".xxx.", "..xxx"],
    ),
    "window and targets, meta: all targets see the same": (
        MaskSpec(**TARGETS, window=2, semantics="meta"),
        6,
        {"num_targets": 3},
        ["x.....", "xx....", "xxx...", ".xxx..", ".xx.x.", ".xx..x"],
    ),
    "window and targets, nvidia: each target sees one fewer": (
        MaskSpec(**TARGETS, window=2, semantics="nvidia"),
        6,
        {"num_targets": 3},
        ["x.....", "xx....", "xxx...", ".xxx..", "..x.x.", ".....x"],
    ),
    "window, context and targets, meta": (
        MaskSpec(**BOTH, window=2, semantics="meta"),
        6,
        {"num_context": 1, "num_targets": 2},
        ["xxxx..", "xx....", "xxx...", ".xxx..", "..xxx.", "..xx.x"],
    ),
    "window, context and targets, nvidia": (
        MaskSpec(**BOTH, window=2, semantics="nvidia"),
        6,
        {"num_context": 1, "num_targets": 2},
        ["xxxx..", "xx....", "xxx...", ".xxx..", "..xxx.", "...x.x"],
    ),
    "targets lift the window with full rows": (
        MaskSpec(**TARGETS, window=1, min_full_rows=1, semantics="meta"),
        5,
        {"num_targets": 1},
        ["x....", "xx...", ".xx..", "xxxx.", "xxxxx"],
    ),
    "not causal, targets": (
        MaskSpec(targets=True, semantics="meta"),
        4,
        {"num_targets": 2},
        ["xxxx", "xxxx", "xxx.", "xx.x"],
    ),
    "not causal, targets, window": (
        MaskSpec(targets=True, window=1, semantics="meta"),
        5,
        {"num_targets": 2},
        ["xx...", "xxx..", ".xxxx", "..xx.", "..x.x"],
    ),
    "blocks": (MaskSpec(block=2), 5, {}, ["xx...", "xx...", "..xx.", "..xx.", "....x"]),
    "one token": (MaskSpec(**CAUSAL, window=1), 1, {}, ["x"]),
    "no token": (MaskSpec(**BOTH), 0, {}, []),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    mask, length, counts, expected = GOLDEN[name]
    assert picture(mask, length, **counts) == expected


def test_ranks_of_the_docstring():
    counts = {"num_context": 1, "num_targets": 2}
    assert ranks(MaskSpec(**BOTH), 6, **counts).tolist() == [0, 1, 2, 3, 4, 4]
    assert ranks(MaskSpec(**BOTH, semantics="nvidia"), 6, **counts).tolist() == [0, 1, 2, 3, 4, 5]
    assert ranks(MaskSpec(causal=True), 3).tolist() == [0, 1, 2]


def test_more_context_and_targets_than_tokens_is_refused():
    with pytest.raises(ValueError, match="2 context tokens and 2 targets do not fit into 3 tokens"):
        sample_mask(MaskSpec(**BOTH), 3, num_context=2, num_targets=2)


def _by_definition(mask: MaskSpec, n: int, m: int, c: int) -> list[list[bool]]:
    """The prose, pair by pair in Python: no tensor, no shared code."""
    h = n - m - c
    first = h + 1 if c else h

    def rank(p):
        if p < c:
            return 0
        t = p - c
        if t < h:
            return t + 1 if c else t
        return first + (t - h if mask.semantics == "nvidia" else 0)

    def sees(i, j):
        d = rank(i) - rank(j) if mask.causal else abs(rank(i) - rank(j))
        yes = i == j or d > 0
        if i != j and i >= n - m and j >= n - m:
            g = mask.target_group_size
            yes = yes and (i - (n - m)) // g == (j - (n - m)) // g
        lifted = mask.min_full_rows > 0 and rank(i) >= first - mask.min_full_rows
        if mask.window and not lifted:
            yes = yes and d <= mask.window
        return yes or (c > 0 and rank(i) == 0 and rank(j) < first)

    return [[sees(i, j) for j in range(n)] for i in range(n)]


@pytest.mark.parametrize(
    ("causal", "semantics", "specs"), [(True, None, 1), (True, "meta", 5), (True, "nvidia", 10), (False, "meta", 5)]
)
def test_every_small_shape_against_the_prose(causal, semantics, specs):
    compared = 0
    for window in (0, 1, 3):
        for full in (0, 2):
            for group in (1, 2):
                try:
                    mask = MaskSpec(causal=causal, targets=True, context=True, window=window, min_full_rows=full,
                                    target_group_size=group, semantics=semantics)  # fmt: skip
                except ValueError:
                    continue
                for n in range(6):
                    for m in range(n + 1):
                        for c in range(n - m + 1):
                            got = sample_mask(mask, n, num_targets=m, num_context=c).tolist()
                            assert got == _by_definition(mask, n, m, c), (mask, n, m, c)
                            compared += 1
    assert compared == specs * 56


def test_time_boundaries_are_the_first_seconds_of_each_bucket():
    buckets = TimeBuckets(function="log", step=0.301, count=8)
    assert time_boundaries(buckets) == (2, 2, 3, 4, 5, 7, 9)
    assert time_boundaries(TimeBuckets(function="sqrt", step=10.0, count=4)) == (100, 400, 900)


def test_time_buckets_use_what_follows_the_row():
    buckets = TimeBuckets(function="sqrt", step=1.0, count=6)
    # rows use 4, 29, 29 (the last repeated); columns 0, 4, 29; gaps 4 0 25 / 29 25 0 / 29 25 0
    times = torch.tensor([0, 4, 29])
    assert time_buckets(buckets, times).tolist() == [[2, 1, 5], [5, 5, 1], [5, 5, 1]]
