"""A rank that cannot read stops all, in an evaluation too; a stream over two ranks leaves damaged row groups out."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from forked_ranks import gemline
from gem_data.api import write_dataset
from gem_data.blocks import chunks_of
from gem_pipelines.rundir import read_records

pytestmark = pytest.mark.distributed

ARGUMENTS = [
    *("--recipe", "debug", "--data.global-batch-size", "40", "--train.peak-flops-per-s", "1e9"),
    *("--train.survey-rows", "0", "--train.tensorboard", "False", "--train.timeout-s", "600"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gem_datasets

    directory = tmp_path_factory.mktemp("data") / "synthetic"
    found = gem_datasets.load("synthetic", rows=300, users=40, items=60, streams=2, max_length=40)
    write_dataset(directory, found.schema, {"train": found.train, "eval": found.eval}, rows_per_group=20)
    return directory


@pytest.fixture
def spoilt(made: Path, tmp_path: Path):
    """spoilt(split, group): a copy with a bit flipped in that row group."""
    import shutil

    def spoil(split: str, group: int) -> Path:
        directory = tmp_path / "data"
        shutil.copytree(made, directory)
        path = next(directory.glob(f"{split}-*.parquet"))
        (chunk,) = (c for c in chunks_of(pq.read_metadata(path), group) if c.column == "user_id")
        data = bytearray(path.read_bytes())
        data[chunk.stop - 2] ^= 4
        path.write_bytes(data)
        return directory

    return spoil


def test_an_evaluation_that_one_rank_cannot_read_stops_both(spoilt, tmp_path) -> None:
    """Of batches of 40 rows each rank reads one row group; the limit of collectives is longer than the test's."""
    data = spoilt("eval", 1)
    steps = ["--train.steps", "1", "--train.eval-batch-size", "40"]
    done = gemline(["train", *ARGUMENTS, *steps, "--data", str(data), "--run-dir", str(tmp_path / "run")])
    assert done.returncode == 1
    named = [line for line in done.stderr.splitlines() if "error: " in line and line.startswith("gemline rank")]
    assert len(named) == 2, done.stderr
    assert all("eval-00000.parquet, row group 1, column user_id" in line for line in named)
    assert sum("evaluation: rank 1 reported" in line for line in named) == 1


def test_a_stream_of_two_ranks_leaves_damaged_row_groups_out(spoilt, tmp_path) -> None:
    data, run = spoilt("train", 6), tmp_path / "run"
    stream = ["--train.steps", "7", "--data.stream-seconds", "400000", "--data.max-quarantined-rows", "20"]
    done = gemline(["train", *ARGUMENTS, *stream, "--data", str(data), "--run-dir", str(run)])
    assert done.returncode == 0, done.stderr
    records = read_records(run / "metrics.jsonl")
    found = [record for record in records if record["kind"] == "progressive"]
    assert len(found) >= 2
    assert sum(record["missing_rows"] for record in found) == 20
    assert [len(record["groups"]) for record in records if record["kind"] == "quarantine"] == [1]
