"""Memory that tensors do not show: the numbers of paper and pencil, one more copy is seen, every process agrees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from cases import find, prepare
from cases.counting import python_calls
from cases.memory import count_memory
from gate_compare import judge

KIB = 1024


def test_arrays_are_counted_one_by_one():
    """10 KiB of numbers and 112 bytes of the array itself are 10 units; `x + 1` makes one more, though one dies."""

    def run(_):
        x = np.zeros(10 * KIB // 8)
        x = x + 1
        return x

    assert count_memory(None, run)["heap_bytes"] == 20 * KIB


def test_small_objects_and_views_are_not():
    given = np.zeros(100_000)
    counts = count_memory(given, lambda x: (x[10:].reshape(-1, 2), [object() for _ in range(50)], np.zeros(300)))
    assert counts == {"heap_bytes": 0, "arrow_bytes": 0, "arrow_peak_bytes": 0}


def test_arrow_and_its_peak():
    """Columns of 8,000 bytes, which Arrow rounds up to 8,000 = 125 x 64: three in all, two at once."""
    numbers = pa.array(range(1000), pa.int64())

    def run(_):
        first = pa.concat_arrays([numbers, numbers[:0]])
        second = pa.concat_arrays([first, numbers[:0]])
        del first
        return second, pa.concat_arrays([numbers, numbers[:0]])

    counts = count_memory(None, run)
    assert (counts["arrow_bytes"], counts["arrow_peak_bytes"]) == (3 * 8000, 2 * 8000)


def test_counting_leaves_no_tracing_behind():
    before = sys.gettrace()
    with pytest.raises(ZeroDivisionError):
        count_memory(None, lambda _: 1 / 0)
    assert sys.gettrace() is before
    assert not __import__("tracemalloc").is_tracing()


@pytest.mark.parametrize("where", ["numpy", "arrow"])
def test_one_more_copy_of_an_epoch_is_seen(where):
    """Of the events' values alone. Python calls stay within their limit: there is one more concatenation."""
    case = find("data.epoch_shuffled_ragged")
    inputs = prepare(case)
    parts = [batch.ids["views.item"].values().numpy() for batch in case.run(inputs)]
    columns = [pa.array(part) for part in parts]

    def copies_more(given):
        batches = case.run(given)
        return batches, np.concatenate(parts) if where == "numpy" else pa.concat_arrays(columns)

    before, after = (count_memory(inputs, run) for run in (case.run, copies_more))
    counter = {"numpy": "heap_bytes", "arrow": "arrow_bytes"}[where]
    assert judge(before[counter], after[counter], 1.02) == "regressed", (before, after)
    calls = [python_calls(lambda run=run: run(inputs)) for run in (case.run, copies_more)]
    assert judge(*calls, 1.02) == "same", calls


FRESH = """
import sys
from cases import find, prepare
from cases.memory import count_memory
for name in sys.argv[1:]:
    case = find(name)
    print(name, count_memory(prepare(case), case.run))
"""


@pytest.mark.slow
def test_five_fresh_processes_agree():
    names = ("data.epoch_shuffled_ragged", "data.exchange_ragged", "datasets.synthetic_ragged", "pipelines.checkpoint")
    found = set()
    for seed in range(5):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FRESH, *names],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1, found
