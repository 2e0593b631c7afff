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
    "tiles",
    "tiles-paired",
    "tiles-by-prefix-sum",
)
TIMEOUT_S = 900


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
    assert len(results) > 100
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


def main(names: list[str]) -> None:
    from functools import partial

    import torch
    from gem_attention import api
    from gem_attention.testing import Quirks, conformance

    attention = partial(api.attention, impl="triton")
    checks = {str(c): partial(c, attention) for c in conformance(Quirks(dtypes=(torch.float16,)))} | _tile_checks()
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
