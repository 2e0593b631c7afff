"""T5: a run of 4 ranks goes on with 1, 2, 3 and 8, and with other shardings of tables and dense parameters.

Right after loading, every tensor of the training state is the stored one, bit for bit, on every layout. The next
step's loss is that of the run that stayed at 4 ranks to 1e-6 relative, and the steps after it to 1e-5: sums run in
another order.
"""

from __future__ import annotations

import shutil

import pytest
from gem_pipelines.checkpoint_format import list_steps, read_checkpoint, step_directory
from gem_pipelines.rundir import read_records

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SLICED = ["--parallel.table-replica", "2", "--parallel.fully-sharded", "True", "--parallel.shard", "2"]
ROWS = ["--parallel.table-sharding", "row_wise"]
CUT = ["--parallel.shard", "2"]
WHOLE = [
    *("--parallel.shard", "1", "--parallel.table-replica", "1", "--parallel.fully-sharded", "False"),
    *("--parallel.table-sharding", "table_wise"),
]
SOURCES = {"tables whole": [], "tables by rows": ROWS, "cut and sliced": SLICED}
TARGETS = {
    "1": (1, []),
    "2": (2, []),
    "2 by rows": (2, ROWS),
    "2 cut and sliced": (2, SLICED),
    "3": (3, []),
    "3 by rows": (3, ROWS),
    "4 by rows, cut": (4, [*ROWS, *CUT]),
    "8": (8, []),
    "8 by rows, cut": (8, [*ROWS, *CUT]),
}
FAST = [("tables whole", target) for target in ("1", "2 by rows", "3", "8 by rows, cut")]
FAST += [("tables by rows", "3"), ("cut and sliced", "2")]


@pytest.fixture(scope="module")
def steps(request):
    """(where it is saved, the last step)"""
    return (50, 71) if request.config.getoption("--full") else (5, 12)


def arguments(steps):
    return [
        *("--data.global-batch-size", "29", "--train.steps", str(steps[1]), "--train.checkpoint-every", str(steps[0])),
        *("--train.peak-flops-per-s", "1e9", "--train.survey-rows", "0", "--train.profile-every", "0"),
        *("--train.tensorboard", "False", "--train.print-every", "1000", "--train.keep-checkpoints", "9"),
    ]


@pytest.fixture(scope="module")
def sources(zygote, debug_data, steps, tmp_path_factory):
    """Runs of 4 ranks in three layouts, each with a checkpoint at the first and the end at the last step."""
    runs = {}
    for name, layout in SOURCES.items():
        run = tmp_path_factory.mktemp("source") / "run"
        command = ["train", "--recipe", "debug", "--data", str(debug_data), "--run-dir", str(run), *arguments(steps)]
        codes = zygote.wait(zygote.start([*command, *layout], world=4, output=run.parent / "out"), seconds=200)
        assert codes == [0] * 4, (run.parent / "out").read_text()[-3000:]
        runs[name] = run
    return runs


def losses(run):
    records = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "train"]
    return {record["step"]: (record["loss"], record["samples"], record["tokens"]) for record in records}


def bits(directory):
    return {k: (v.dtype, tuple(v.shape), v.numpy().tobytes()) for k, v in read_checkpoint(directory).tensors.items()}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        every = [(source, target) for source in SOURCES for target in TARGETS]
        cases = every if metafunc.config.getoption("--full") else FAST
        metafunc.parametrize("case", cases, ids=[f"4 {source} to {target}" for source, target in cases])


def test_t5_any_layout_goes_on(zygote, sources, steps, case, counted, tmp_path):
    source, (world, layout) = sources[case[0]], TARGETS[case[1]]
    run, output = tmp_path / "run", tmp_path / "out"
    shutil.copytree(source, run)
    for step in list_steps(run / "checkpoints"):
        if step != steps[0]:
            shutil.rmtree(step_directory(run / "checkpoints", step))
    command = ["train", "--resume", "--run-dir", str(run), *WHOLE, *layout]
    fault = {"name": "recapture", "into": str(tmp_path)}
    pids = zygote.start(command, world=world, output=output, faults=dict.fromkeys(range(world), fault))
    assert zygote.wait(pids, seconds=200) == [0] * world, output.read_text()[-3000:]
    stored = step_directory(source / "checkpoints", steps[0])
    assert bits(step_directory(tmp_path, steps[0])) == bits(stored)
    expected, found = losses(source), losses(run)
    assert list(found) == list(range(1, steps[1] + 1))
    gaps = {s: abs(found[s][0] - expected[s][0]) / abs(expected[s][0]) for s in range(steps[0] + 1, steps[1] + 1)}
    assert [found[s][1:] for s in gaps] == [expected[s][1:] for s in gaps]
    assert gaps[steps[0] + 1] <= 1e-6
    assert max(gaps.values()) <= 1e-5
    counted("next step", f"{gaps[steps[0] + 1]:.1e}")
    counted(f"{len(gaps)} steps", f"{max(gaps.values()):.1e}")
