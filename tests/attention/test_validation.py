"""What is refused, and that each refusal names both sides."""

import pytest
import torch
from gem_attention.api import attention, make_layout
from gem_attention.interface import (
    AttentionSpec,
    BiasSpec,
    CannotRunError,
    MaskSpec,
    RotarySpec,
    TimeBuckets,
)

SPEC = AttentionSpec(activation="silu", scale=1.0)
CROSS = AttentionSpec(activation="silu", scale=1.0, query="cross")
OFFSETS = torch.tensor([0, 2, 2, 5])


def tensors(*shapes, dtype=torch.float32, device="cpu"):
    return tuple(torch.ones(*shape, dtype=dtype, device=device) for shape in shapes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MaskSpec(block=64, causal=True), "block=64 .* mixes with no other rule; got also causal"),
        (lambda: MaskSpec(window=-1), "mask.window=-1: expected a whole number >= 0"),
        (lambda: MaskSpec(window=2.5), "mask.window=2.5: expected a whole number"),
        (lambda: MaskSpec(causal=True, min_full_rows=2), "lifts a window, but window=0"),
        (lambda: MaskSpec(causal=True, target_group_size=2), "groups targets, but targets=False"),
        (lambda: MaskSpec(causal=True, targets=True, target_group_size=2, semantics="meta"), "'nvidia' semantics only"),
        (lambda: MaskSpec(causal=True, targets=True, window=4), "window=4 differ between public systems"),
        (lambda: MaskSpec(targets=True), "targets without causal are defined by the 'meta' semantics only"),
        (lambda: MaskSpec(targets=True, semantics="nvidia"), "targets without causal"),
        (lambda: MaskSpec(semantics="google"), "mask.semantics='google': expected one of None, 'meta', 'nvidia'"),
        (lambda: BiasSpec(where="inside_scale"), "needs max_positions > 0, time buckets, or both"),
        (lambda: BiasSpec(where="before", max_positions=3), "bias.where='before'"),
        (lambda: TimeBuckets(step=0.0), "time.step=0.0: expected a number > 0"),
        (lambda: TimeBuckets(function="exp"), "time.function='exp'"),
        (lambda: RotarySpec(pairing="halves", base=-1.0), "rotary.base=-1.0"),
        (lambda: RotarySpec(pairing="quarters"), "rotary.pairing='quarters'"),
        (lambda: AttentionSpec(activation="tanh", scale=1.0), "activation='tanh': expected one of 'softmax'"),
        (lambda: AttentionSpec(activation="silu", scale=float("nan")), "scale=nan: expected a finite number"),
        (lambda: AttentionSpec(activation="silu", scale=1.0, divisor=0.0), "divisor=0.0: expected a number > 0"),
        (lambda: AttentionSpec(activation="softmax", scale=1.0, divisor=2.0), "softmax is normalised already"),
        (lambda: AttentionSpec(activation="softmax", scale=1.0, divisor="per_token"), "softmax is normalised already"),
        (
            lambda: AttentionSpec(activation="silu", scale=1.0, query="cross", mask=MaskSpec(causal=True)),
            "query='cross' has no common positions of queries and keys, so no mask",
        ),
        (
            lambda: AttentionSpec(
                activation="silu", scale=1.0, query="broadcast", bias=BiasSpec(where="inside_scale", max_positions=4)
            ),
            "query='broadcast' has no common positions of queries and keys, so no bias",
        ),
    ],
)
def test_specs(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "make_layout needs q_offsets"),
        ({"q_offsets": torch.tensor([1, 3])}, r"k_offsets\[0\] is 1: offsets start at 0"),
        ({"q_offsets": torch.tensor([0, 4, 3, 5])}, "goes down at position 2: 4 then 3"),
        ({"q_offsets": torch.tensor([0, 2, 5]), "total_q": 6}, r"k_offsets\[-1\] is 5, but the layout has 6 rows"),
        ({"q_offsets": torch.tensor([0, 2, 5]), "max_q_len": 2}, "sample 1 has 3 rows .* maximum length 2"),
        ({"q_offsets": torch.tensor([0, 2], dtype=torch.int32)}, "expected int64, got torch.int32"),
        ({"q_offsets": torch.tensor([[0, 2]])}, r"expected \(samples \+ 1,\), got shape \(1, 2\)"),
        ({"q_offsets": torch.empty(0, dtype=torch.int64)}, "expected .samples"),
        ({"q_offsets": OFFSETS, "k_offsets": torch.tensor([0, 4])}, "k_offsets has 1 rows for 3 samples"),
        ({"q_offsets": OFFSETS, "num_targets": torch.tensor([1, 0])}, "num_targets: expected 3 entries, got 2"),
        ({"q_offsets": OFFSETS, "num_targets": torch.tensor([1, 0, -1])}, r"num_targets\[2\] is -1"),
        ({"q_offsets": OFFSETS, "num_context": torch.tensor([-1, 0, 1])}, r"num_context\[0\] is -1"),
        ({"q_offsets": OFFSETS, "num_context": torch.tensor([0, 1, 0])}, "sample 1 has 0 tokens, fewer than its 1 con"),
        (
            {"q_offsets": OFFSETS, "num_context": torch.tensor([1, 0, 2]), "num_targets": torch.tensor([1, 0, 2])},
            "sample 2 has 3 tokens, fewer than its 2 context tokens and 2 targets",
        ),
        ({"q_offsets": OFFSETS, "timestamps": torch.zeros(4, dtype=torch.int64)}, "timestamps: expected 5 entries"),
        (
            {"q_offsets": OFFSETS, "timestamps": torch.tensor([0, 2**31 - 2, -5, 7, 2**31 - 6])},
            "timestamps of sample 2 span 2147483647 s, expected at most 2147483646",
        ),
        (
            {"q_offsets": OFFSETS, "k_offsets": torch.tensor([0, 4, 6]), "kv_index": torch.tensor([0, 1, 0])},
            "kv_index goes down at position 2: 1 then 0",
        ),
        (
            {"q_offsets": OFFSETS, "k_offsets": torch.tensor([0, 4, 6]), "kv_index": torch.tensor([0, 1, 2])},
            r"kv_index\[2\] is 2: k and v have 2 rows",
        ),
        (
            {"q_offsets": OFFSETS, "k_offsets": torch.tensor([0, 4, 6]), "kv_index": torch.tensor([0, 1])},
            "q_offsets has 3 samples, the layout 2",
        ),
        (
            {"q_offsets": OFFSETS, "k_offsets": torch.tensor([0, 4, 4, 6]), "tail": True},
            "sample 2 has 3 queries and 2 keys",
        ),
        ({"k_offsets": OFFSETS, "tail": True}, "tail=True needs q_offsets"),
    ],
)
def test_layouts(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_layout(**arguments)


BIAS = BiasSpec(where="inside_scale", max_positions=4, time=TimeBuckets(count=8))
BIASED = AttentionSpec(activation="silu", scale=1.0, bias=BIAS)
TIMES = torch.arange(5)


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize(
    ("qkv", "spec", "layout", "more", "message"),
    [
        (tensors((5, 2), (5, 2, 4), (5, 2, 4)), SPEC, {"q_offsets": OFFSETS}, {}, "q: expected .tokens, heads, dim."),
        (tensors((4, 2, 4), (5, 2, 4), (5, 2, 4)), SPEC, {"q_offsets": OFFSETS}, {}, "q has 4 rows, the layout 5"),
        (tensors((5, 2, 4), (6, 2, 4), (6, 2, 4)), SPEC, {"q_offsets": OFFSETS}, {}, "k has 6 rows, the layout 5"),
        (
            tensors((5, 2, 4), (5, 2, 4), (5, 1, 4)),
            SPEC,
            {"q_offsets": OFFSETS},
            {},
            "k and v must agree in rows and h",
        ),
        (tensors((5, 2, 4), (5, 2, 8), (5, 2, 4)), SPEC, {"q_offsets": OFFSETS}, {}, "q and k must agree in head dim"),
        (tensors((5, 3, 4), (5, 2, 4), (5, 2, 4)), SPEC, {"q_offsets": OFFSETS}, {}, "3 query heads cannot share 2 kv"),
        (tensors((5, 2, 0), (5, 2, 0), (5, 2, 4)), SPEC, {"q_offsets": OFFSETS}, {}, "head dims must be > 0"),
        (
            (*tensors((5, 2, 4), (5, 2, 4)), *tensors((5, 2, 4), dtype=torch.float64)),
            SPEC,
            {"q_offsets": OFFSETS},
            {},
            "must share a dtype; got torch.float32, torch.float32, torch.float64",
        ),
        (
            tensors((5, 2, 4), (5, 2, 4), (5, 2, 4), dtype=torch.int32),
            SPEC,
            {"q_offsets": OFFSETS},
            {},
            "q: expected a floating dtype, got torch.int32",
        ),
        (
            tensors((5, 2, 4), (5, 2, 4), (5, 2, 4), device="meta"),
            SPEC,
            {"q_offsets": OFFSETS},
            {},
            "q is on meta, the layout on cpu",
        ),
        (tensors(*[(5, 2, 4)] * 3), CROSS, {"k_offsets": OFFSETS}, {}, "query='cross' needs q_offsets"),
        (
            tensors(*[(5, 2, 4)] * 3),
            AttentionSpec(activation="silu", scale=1.0, query="broadcast"),
            {"q_offsets": OFFSETS},
            {},
            "query='broadcast' has dense q",
        ),
        (
            tensors(*[(5, 2, 4)] * 3),
            SPEC,
            {"q_offsets": OFFSETS, "k_offsets": OFFSETS.clone()},
            {},
            "query='self' needs one set of offsets",
        ),
        (
            tensors(*[(5, 2, 4)] * 3),
            AttentionSpec(activation="silu", scale=1.0, query="tail"),
            {"q_offsets": OFFSETS, "k_offsets": OFFSETS.clone()},
            {},
            "query='tail', but the layout was built with tail=False",
        ),
        (
            tensors(*[(5, 2, 4)] * 3),
            AttentionSpec(activation="silu", scale=1.0, mask=MaskSpec(causal=True, targets=True)),
            {"q_offsets": OFFSETS},
            {},
            "spec.mask.targets is set, but the layout has no num_targets",
        ),
        (
            tensors(*[(5, 2, 4)] * 3),
            BIASED,
            {"q_offsets": OFFSETS},
            {},
            "bias.time is set, but the layout has no times",
        ),
        (
            tensors(*[(5, 2, 4)] * 3),
            BIASED,
            {"q_offsets": OFFSETS, "timestamps": TIMES},
            {"time_table": torch.ones(2, 8)},
            "the spec's bias needs position_table, .heads, 7.",
        ),
        (
            tensors(*[(5, 2, 4)] * 3),
            BIASED,
            {"q_offsets": OFFSETS, "timestamps": TIMES},
            {"position_table": torch.ones(2, 7), "time_table": torch.ones(3, 8)},
            "time_table: expected .heads, 8. with heads a divisor of 2; got shape .3, 8.",
        ),
        (
            tensors((7, 2, 4), (7, 2, 4), (7, 2, 4)),
            AttentionSpec(activation="silu", scale=1.0, bias=BiasSpec(where="inside_scale", max_positions=4)),
            {"q_offsets": torch.tensor([0, 2, 7])},
            {"position_table": torch.ones(2, 7)},
            "allows 5 tokens a sample, bias.max_positions is 4",
        ),
        (
            tensors(*[(5, 2, 4)] * 3),
            SPEC,
            {"q_offsets": OFFSETS},
            {"time_table": torch.ones(2, 8)},
            "time_table was given, but the spec's bias does not use it",
        ),
        (
            tensors(*[(5, 2, 4)] * 3),
            AttentionSpec(activation="silu", scale=1.0, divisor="per_token"),
            {"q_offsets": OFFSETS},
            {},
            "divisor is 'per_token', but no divisor was given",
        ),
        (
            tensors(*[(5, 2, 4)] * 3),
            AttentionSpec(activation="silu", scale=1.0, divisor="per_token"),
            {"q_offsets": OFFSETS},
            {"divisor": torch.ones(4)},
            r"divisor: expected shape \(5,\), got \(4,\)",
        ),
        (
            tensors(*[(5, 2, 4)] * 3),
            SPEC,
            {"q_offsets": OFFSETS},
            {"divisor": torch.ones(5)},
            "a divisor tensor was given, but spec.divisor is 1.0",
        ),
    ],
)
def test_calls_are_refused_alike_by_every_implementation(impl, qkv, spec, layout, more, message):
    with pytest.raises(ValueError, match=message):
        attention(*qkv, spec=spec, layout=make_layout(**layout), impl=impl, **more)


def test_an_unknown_implementation_is_named():
    q = torch.ones(5, 2, 4)
    with pytest.raises(ValueError, match="impl='cutlass': expected one of 'reference', 'eager', 'triton'"):
        attention(q, q, q, spec=SPEC, layout=make_layout(q_offsets=OFFSETS), impl="cutlass")


def test_what_cannot_run_says_why():
    offsets = OFFSETS.to("meta")
    layout = make_layout(q_offsets=offsets, total_q=5, max_q_len=3, check_values=False)
    q = torch.empty(5, 2, 4, device="meta")
    with pytest.raises(CannotRunError, match="impl='reference' cannot run here: a meta tensor has no offsets"):
        attention(q, q, q, spec=SPEC, layout=layout, impl="reference")


def test_sizes_past_two_billion_elements_are_checked_in_whole_numbers():
    tokens = 2**20
    layout = make_layout(
        q_offsets=torch.empty(1025, dtype=torch.int64, device="meta"),
        total_q=tokens + 1,
        max_q_len=2048,
        check_values=False,
    )
    q = torch.empty(tokens, 32, 128, device="meta", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="k has 1048576 rows, the layout 1048577"):
        attention(q, q, q, spec=SPEC, layout=layout, impl="eager")
