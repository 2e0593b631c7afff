"""The Triton kernels, in Triton's interpreter, against the shipped suite.

The interpreter must be on before the kernels are imported, so all checks run in one child process (this file as a
program), which reports one line a check. float16: the interpreter rounds bfloat16 towards zero, which no GPU does.
"""

import json
import os
import subprocess
import sys

import pytest

FAST = (
    "float64-silu-causal-window-float16",
    "float64-softmax-groups-float16",
    "float64-silu-context-targets-float16",
    "float64-softmax-context-float16",
    "float64-silu-tail-bias-float16",
    "repeatable-softmax-position-bias-float16",
    "float64-softmax-fused-broadcast-float16",
    "float64-silu-cross-no-keys-float16",
    "float64-silu-gqa-shared-float16",
    "float64-silu-narrow-values-cross-float16",
    "tiles",
    "tiles-paired",
    "tiles-by-prefix-sum",
    "tiles-kept",
    "halves-of-tiles",
    "bias-over-many-tiles-causal",
)
TIMEOUT_S = 1800


def _run(names: list[str]) -> dict[str, str]:
    child = subprocess.run(
        [sys.executable, __file__, *names],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def fast_results():
    return _run(list(FAST))


@pytest.mark.parametrize("name", FAST)
def test_kernels_in_the_interpreter(name, fast_results):
    assert fast_results[name] == "ok"


@pytest.mark.slow
def test_the_whole_suite_in_the_interpreter():
    results = _run([])
    assert len(results) > 250
    assert {name: text for name, text in results.items() if text != "ok"} == {}


def _tile_checks():
    """The list of tiles against its definition, worked out by hand and by a loop."""
    import torch
    from gem_attention import triton_tiles

    def listed(lengths, block, **options):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        sequences = triton_tiles.Sequences(offsets, offsets, None, None, None, 0)
        return triton_tiles.tile_list(
            sequences, rows_offsets=offsets, work_offsets=offsets, rows=sum(lengths), block=block, **options
        ).tolist()

    def plain():
        rows = listed((2, 0, 5), 4)
        # sample, row, q start, q length, k start, k length
        assert [r[:6] for r in rows[:3]] == [[2, 4, 2, 5, 2, 5], [2, 0, 2, 5, 2, 5], [0, 0, 0, 2, 0, 2]], rows
        assert [r[0] for r in rows[3:]] == [-1, -1], rows

    def paired():
        rows = listed((9, 0, 5), 4, paired=True)
        # three tiles and an empty partner of sample 0, then two of sample 2
        assert [(r[0], r[1]) for r in rows[:3]] == [(0, 8), (0, 0), (0, 4)], rows
        assert rows[3][0] == -1, rows
        assert [(r[0], r[1]) for r in rows[4:6]] == [(2, 4), (2, 0)], rows
        assert all(r[0] == -1 for r in rows[6:]), rows

    def by_prefix_sum():
        triton_tiles.RANKED_LIMIT = 1
        rows = listed((2, 0, 5), 4)
        assert [(r[0], r[1]) for r in rows[:3]] == [(0, 0), (2, 4), (2, 0)], rows
        assert all(r[0] == -1 for r in rows[3:]), rows

    return {"tiles": plain, "tiles-paired": paired, "tiles-by-prefix-sum": by_prefix_sum}


def _kept_tiles():
    """The layers of a layout share their tile lists, forward and backward; nothing else does, and nothing stays."""
    import gc

    import torch
    from gem_attention import api, tile_lists, triton_launch
    from gem_attention.interface import AttentionSpec, MaskSpec

    made, make = [], triton_launch.tile_list

    def counted(sequences, **options):
        made.append(options)
        return make(sequences, **options)

    def layout_of(lengths):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        targets = torch.tensor([min(n, 2) for n in lengths])
        return api.make_layout(q_offsets=offsets, num_targets=targets)

    plain = AttentionSpec(activation="silu", scale=0.3, divisor=4.0, mask=MaskSpec(causal=True))
    targets = AttentionSpec(activation="silu", scale=0.3, divisor=4.0, mask=MaskSpec(causal=True, targets=True))

    def two_layers(lengths, specs, impl, dtype):
        layout = layout_of(lengths)
        generator = torch.Generator().manual_seed(sum(lengths))
        x = torch.randn(sum(lengths), 1, 16, generator=generator).half().to(dtype).requires_grad_()
        y = x
        for spec in specs:
            y = api.attention(y, y, x, spec=spec, layout=layout, impl=impl)
        del layout
        gc.collect()
        y.sum().backward()
        return y.detach(), x.grad

    triton_launch.tile_list = counted
    try:
        for lengths, specs, lists in (
            ((9, 0, 5), (plain, plain), 2),  # of rows of q and of k; their tiles are 64 in all kernels
            ((6, 11), (plain, plain), 2),  # other lengths, a list of its own
            ((9, 6), (plain, targets), 4),  # what a record says depends on the mask
        ):
            made.clear()
            got = two_layers(lengths, specs, "triton", torch.float16)
            assert len(made) == lists, (lengths, made)
            for mine, exact in zip(got, two_layers(lengths, specs, "reference", torch.float64), strict=True):
                error = (mine.double() - exact).abs().max() / exact.abs().max()
                assert error < 4e-3, error.item()
    finally:
        triton_launch.tile_list = make
    gc.collect()
    assert not tile_lists._by_number, "lists outlive their layouts"


def _halves_of_tiles():
    """What gluon_forward.own_blocks rests on: the columns that 64 rows visit lie, in whole blocks, inside those that
    their tile of 128 rows visits; and none that they see lies outside."""
    import torch
    from gem_attention.interface import AttentionSpec, MaskSpec
    from gem_attention.masks import sample_mask
    from gem_attention.triton_config import Tiles, kernel_spec
    from gem_attention.triton_launch import Problem, run_numbers
    from range_kernel import ranges

    masks = (
        MaskSpec(causal=True),
        MaskSpec(causal=True, window=255),
        MaskSpec(causal=True, targets=True, context=True),
        MaskSpec(causal=True, targets=True, context=True, window=70, min_full_rows=20, semantics="meta"),
        MaskSpec(window=30, context=True),
        MaskSpec(targets=True, semantics="meta"),
        MaskSpec(block=64),
    )
    length, targets, context = 700, 40, 130
    for mask in masks:
        spec = AttentionSpec(activation="silu", scale=1.0, mask=mask)
        c = kernel_spec(spec, Tiles(block_m=128, block_n=64), heads=1, kv_heads=1, dim=16, v_dim=16)
        row = torch.zeros(length, 1, 16)
        p = Problem(q=row, k=row, v=row, spec=spec, batch_size=1, k_offsets=torch.tensor([0, length]))
        tiles = -(-length // 128)
        out = torch.zeros(tiles, 3, 4, dtype=torch.int64)
        ranges[(tiles,)](out, length, targets, context, run_numbers(p), C=c)
        counts = {"num_targets": targets if mask.targets else 0, "num_context": context if mask.context else 0}
        seen = sample_mask(mask, length, **counts)
        for t, (tile, *halves) in enumerate(out.tolist()):
            for half, (lo, mid, top, hi) in enumerate(halves):
                rows = seen[128 * t + 64 * half : min(128 * t + 64 * half + 64, length)]
                if not len(rows):
                    continue
                case = (mask, t, half)
                assert tile[0] <= lo <= mid <= top <= hi <= tile[3], case
                assert lo % 64 == mid % 64 == top % 64 == hi % 64 == 0, case
                assert not rows[:, :lo].any(), case
                assert not rows[:, hi:].any(), case
                assert rows[:, mid : min(top, length)].all(), case


def _bias_over_many_tiles(mask, counts):
    """Tables and their gradients where samples span several tiles, so that runs down a diagonal have several steps;
    times that go up and down, far apart and equal, so that a tile spans no, one and many buckets."""
    import torch
    from gem_attention import api
    from gem_attention.interface import AttentionSpec, BiasSpec, MaskSpec, TimeBuckets

    lengths = (150, 1, 0, 70)
    generator = torch.Generator().manual_seed(7)
    bias = BiasSpec(where="inside_scale", max_positions=150, time=TimeBuckets(count=40))
    spec = AttentionSpec(activation="silu", scale=0.2, divisor=16.0, mask=MaskSpec(**mask), bias=bias)
    gaps = torch.randint(0, 3, (sum(lengths),), generator=generator) * 7 ** torch.randint(
        0, 6, (sum(lengths),), generator=generator
    )
    gaps[40:44] = torch.tensor([-3000, 5, -1, 2])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    layout = api.make_layout(q_offsets=offsets, timestamps=gaps.cumsum(0), **counts)
    tensors = [torch.randn(sum(lengths), 2, 16, generator=generator).half() for _ in range(4)]
    tables = [torch.randn(n, width, generator=generator) for n, width in ((1, 299), (2, 40))]

    def gradients(impl, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (*tensors[:3], *tables)]
        q, k, v, position, time = leaves
        out = api.attention(q, k, v, spec=spec, layout=layout, position_table=position, time_table=time, impl=impl)
        out.backward(tensors[3].to(dtype))
        return [out, *(x.grad for x in leaves)]

    exact = gradients("reference", torch.float64)
    for got, want in zip(gradients("triton", torch.float16), exact, strict=True):
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < 4e-3, error.item()


def _bias_checks():
    from functools import partial

    import torch

    targets, context = torch.tensor([5, 0, 0, 9]), torch.tensor([4, 0, 0, 2])
    cases = {
        "causal": ({"causal": True, "targets": True}, {"num_targets": targets}),
        "window": ({"window": 40}, {}),
        "none": ({}, {}),
        "context": (
            {"causal": True, "targets": True, "context": True, "window": 30, "semantics": "meta"},
            {"num_targets": targets, "num_context": context},
        ),
    }
    return {f"bias-over-many-tiles-{name}": partial(_bias_over_many_tiles, *case) for name, case in cases.items()}


def main(names: list[str]) -> None:
    from functools import partial

    import torch
    from gem_attention import api
    from gem_attention.testing import Quirks, conformance

    attention = partial(api.attention, impl="triton")
    checks = {str(c): partial(c, attention) for c in conformance(Quirks(dtypes=(torch.float16,)))} | _tile_checks()
    checks["halves-of-tiles"] = _halves_of_tiles
    checks["tiles-kept"] = _kept_tiles
    checks |= _bias_checks()
    results = {}
    for name in names or checks:
        try:
            checks[name]()
            results[name] = "ok"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
