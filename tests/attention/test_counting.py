"""Counts: by hand, against the masks, and the published benchmark shapes to the last pair."""

from itertools import product
from math import exp
from statistics import NormalDist

import pytest
import torch
from gem_attention.api import make_layout
from gem_attention.counting import AttentionCount, count_attention, count_call, count_pairs
from gem_attention.interface import AttentionSpec, MaskSpec
from gem_attention.masks import sample_mask


def silu(**mask) -> AttentionSpec:
    return AttentionSpec(activation="silu", scale=1.0, mask=MaskSpec(**mask))


def lognormal_lengths(samples, median, sigma, low, high):
    quantile = NormalDist().inv_cdf
    return [max(low, min(high, round(median * exp(sigma * quantile((i + 0.5) / samples))))) for i in range(samples)]


B1_LENGTHS = lognormal_lengths(256, 768, 1.0, 32, 4096)


def test_by_hand():
    # one sequence of 3, causal: pairs 1 + 2 + 3 = 6; q, k, v, out of 3 * 2 elements of 2 bytes: 12 bytes each
    count = count_attention(silu(causal=True), q_lengths=[3], heads=1, qk_dim=2)
    assert count == AttentionCount(
        pairs=6, forward_flops=48, backward_flops=120, forward_bytes=4 * 12, backward_bytes=7 * 12
    )


def test_by_hand_softmax_keeps_output_and_lse():
    # 3 rows, 1 head: log-sum-exp 12 bytes; backward reads the output (12) and it (12) as well
    spec = AttentionSpec(activation="softmax", scale=1.0, mask=MaskSpec(causal=True))
    count = count_attention(spec, q_lengths=[3], heads=1, qk_dim=2)
    assert (count.forward_bytes, count.backward_bytes) == (4 * 12 + 12, 7 * 12 + 24)


def test_by_hand_shared_keys_and_unequal_dims():
    # 2 + 1 queries on kv row 0 (4 keys), 1 kv head for 2 heads, D 8, E 4: pairs 12
    spec = AttentionSpec(activation="gelu", scale=1.0, query="cross")
    count = count_attention(
        spec, q_lengths=[2, 1], k_lengths=[4], kv_index=[0, 0], heads=2, kv_heads=1, qk_dim=8, v_dim=4, element_bytes=4
    )
    assert count.pairs == 12
    assert count.forward_flops == 2 * 2 * 12 * 12
    assert count.backward_flops == 2 * 2 * (24 + 8) * 12
    q, k, v, out = 3 * 2 * 8 * 4, 4 * 8 * 4, 4 * 4 * 4, 3 * 2 * 4 * 4
    assert count.forward_bytes == q + k + v + out
    assert count.backward_bytes == 2 * (q + k + v) + out


def test_by_hand_seeds_count_once():
    spec = AttentionSpec(activation="silu", scale=1.0, query="broadcast")
    count = count_attention(spec, q_lengths=[2, 2], k_lengths=[3, 1], heads=1, qk_dim=4)
    assert count.pairs == 8
    assert count.forward_bytes == 2 * (2 * 4 + 2 * 4 * 4 + 2 * 2 * 4)


@pytest.mark.parametrize(
    ("spec", "arguments", "pairs", "forward_tflop"),
    [
        (silu(causal=True, targets=True), {"q_lengths": B1_LENGTHS, "num_targets": [32] * 256}, 308_699_631, 0.632),
        (silu(causal=True), {"q_lengths": [4096] * 32}, 32 * 4096 * 4097 // 2, 0.550),
        # a row of the published windowed shape sees 256 columns, itself included
        (silu(causal=True, window=255), {"q_lengths": B1_LENGTHS}, 66_694_435, 0.137),
        (silu(), {"q_lengths": [max(1, round((i + 0.5) / 1152 * 512)) for i in range(1152)]}, 100_663_297, 0.206),
        (
            AttentionSpec(activation="gelu", scale=1.0, query="broadcast"),
            {"q_lengths": [32] * 2048, "k_lengths": lognormal_lengths(2048, 256, 1.0, 16, 2048)},
            26_305_696,
            0.054,
        ),
    ],
    ids=["B1", "B1f", "B1w", "B2-jagged", "B3b"],
)
def test_published_shapes(spec, arguments, pairs, forward_tflop):
    count = count_attention(spec, heads=4, qk_dim=128, **arguments)
    assert count.pairs == pairs
    assert count.forward_flops == 4 * 4 * 128 * pairs
    assert count.backward_flops == 10 * 4 * 128 * pairs
    assert round(count.forward_flops / 1e12, 3) == forward_tflop


def test_pairs_are_those_of_the_masks():
    compared = 0
    for causal, window, full, semantics, group, targets, context, block in product(
        (True, False), (0, 1, 3), (0, 2), (None, "meta", "nvidia"), (1, 2), (True, False), (True, False), (0, 3)
    ):
        try:
            mask = MaskSpec(causal=causal, window=window, min_full_rows=full, semantics=semantics,
                            target_group_size=group, targets=targets, context=context, block=block)  # fmt: skip
        except ValueError:
            continue
        shapes = [(n, m, c) for n in (0, 1, 2, 5, 8) for m in range(0, n + 1, 2) for c in range(0, n - m + 1, 2)]
        shapes = [(n, m if targets else 0, c if context else 0) for n, m, c in shapes]
        n, m, c = torch.tensor(shapes).T
        masks = [sample_mask(mask, n, num_targets=m, num_context=c) for n, m, c in shapes]
        spec = AttentionSpec(activation="silu", scale=1.0, mask=mask)
        assert count_pairs(spec, n, n, m, c) == sum(int(x.sum()) for x in masks), mask
        tail = AttentionSpec(activation="silu", scale=1.0, mask=mask, query="tail")
        rows = (n + 1) // 2
        expected = sum(int(x[x.shape[0] - int(r) :].sum()) for x, r in zip(masks, rows, strict=True))
        assert count_pairs(tail, rows, n, m, c) == expected, mask
        compared += 1
    assert compared == 105


def test_meta_tensors_past_two_billion_elements():
    tokens = 2**20
    lengths = torch.full((1024,), 1024, dtype=torch.int64)
    layout = make_layout(q_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    q = torch.empty(tokens, 32, 128, device="meta", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    count = count_call(q, q, q, spec=silu(causal=True), layout=layout)
    assert count.pairs == 1024 * 1024 * 1025 // 2
    assert count.forward_flops == 4 * 32 * 128 * count.pairs
    assert count.forward_bytes == 4 * q.numel() * 2


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="got 2 q lengths, 2 keys, 1 targets"):
        count_attention(silu(causal=True, targets=True), q_lengths=[3, 4], num_targets=[1], heads=1, qk_dim=8)
