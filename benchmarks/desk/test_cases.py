"""pytest-benchmark over the same cases, for work at the desk (uncommitted changes too).

pytest benchmarks/desk -k hstu --benchmark-json=before.json
pytest benchmarks/desk -k hstu --benchmark-compare
"""

from __future__ import annotations

import pytest
from cases import all_cases, figures, prepare
from timing import cpu_clock


@pytest.mark.parametrize("case", [case for case in all_cases() if case.timed], ids=lambda case: case.name)
@pytest.mark.benchmark(timer=cpu_clock, warmup=False, max_time=0.5, min_rounds=3)
def test_case(case, benchmark):
    inputs = prepare(case)
    benchmark.extra_info.update(figures(case))
    benchmark(case.run, inputs)
