"""Ids that earn their rows, through a whole job: trained, counted, saved in the middle of a round and resumed."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import torch
from gem_pipelines import checkpoint
from gem_pipelines.checkpoint_format import step_directory
from gem_pipelines.checkpoint_incremental import read_whole
from gem_pipelines.checkpoint_saver import expected_bytes
from gem_pipelines.cli import main
from gem_pipelines.config import TablesConfig
from gem_pipelines.errors import CheckpointError, ConfigError
from gem_pipelines.recipes import find_recipe
from gem_pipelines.rundir import read_records

STEPS, BATCH = 20, 8
ARGUMENTS = ["--recipe", "debug", "--data.global-batch-size", str(BATCH), "--train.tensorboard", "False"]
ARGUMENTS += ["--train.profile-every", "0", "--train.peak-flops-per-s", "1e9", "--train.keep-checkpoints", "9"]
ZCH = ["--tables.policies", "item=zch", "ads.item=zch", "--tables.zch", "item=lru:4:12"]


def train(data, run, *more) -> int:
    return main(["train", *ARGUMENTS, *ZCH, "--data", str(data), "--run-dir", str(run), *more])


@pytest.fixture(scope="module")
def whole(debug_data, tmp_path_factory):
    """A run of 20 steps with a checkpoint at step 10, in the middle of a round of 4, and an evaluation there."""
    run = tmp_path_factory.mktemp("dynamic") / "run"
    given = ["--train.steps", str(STEPS), "--train.checkpoint-every", "10", "--train.eval-every", "10"]
    assert train(debug_data, run, *given, "--train.report", "True") == 0
    return run


def test_counted_by_feature_in_metrics_and_report(debug_data, whole):
    last = [record for record in read_records(whole / "metrics.jsonl") if record["kind"] == "train"][-1]
    evaluated = pq.read_table(next(debug_data.glob("eval-*.parquet")))["id.item"].to_numpy()
    assert last["ids_seen"]["item"] == STEPS * BATCH + len(evaluated)
    assert 0 < last["ids_outside"]["item"] < last["ids_seen"]["item"]
    assert last["ids_inserted"]["item"] == last["ids_inserted"]["ads.item"] >= 11  # all rows but the shared one
    assert 0 < last["ids_evicted"]["item"] == last["ids_inserted"]["item"] - 11
    report = (whole / "report.md").read_text()
    row = next(line for line in report.splitlines() if "zch" in line and "ads.item" not in line and "| item" in line)
    assert f"{last['ids_evicted']['item']}" in row


def test_a_checkpoint_in_the_middle_of_a_round_goes_on_to_the_bit(debug_data, whole, tmp_path):
    half = read_whole(step_directory(whole / "checkpoints", 10)).tensors
    assert half["ids.item.ids"].dtype == torch.int64
    assert half["tables.item.weight"].shape[0] == half["ids.item.ids"].shape[0] == 12
    assert half["ids.item.steps"].item() == 10
    assert half["ids.item.seen_ids"].numel() > 0, "nothing of the round was saved"
    run = tmp_path / "run"
    assert (
        train(debug_data, run, "--train.steps", "10", "--optimizer.schedule", "constant", "--train.eval-every", "5")
        == 0
    )
    again = ["--resume", "--train.steps", str(STEPS)]
    assert main(["train", "--run-dir", str(run), *again]) == 0
    straight = tmp_path / "straight"
    given = ["--train.steps", str(STEPS), "--optimizer.schedule", "constant", "--train.eval-every", "5"]
    assert train(debug_data, straight, *given) == 0
    first, second = (read_whole(step_directory(path / "checkpoints", STEPS)).tensors for path in (straight, run))
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def test_a_map_goes_with_its_table_or_not_at_all(make_job, take_steps, tmp_path):
    """Started from another run: with the same rows and eviction the map comes along; else neither of them does."""
    from gem_pipelines.checkpoint_start import compare, start_from

    tables = {"policies": ("item=zch", "ads.item=zch"), "zch": ("item=lru:1:12",)}
    job = make_job(tables=tables)
    take_steps(job, 1)
    (tmp_path / "checkpoints").mkdir()
    saved = checkpoint.save(tmp_path / "checkpoints", job.trainer, job.loader, keep=1)
    same = make_job("same", tables=tables)
    start_from(saved, same.trainer, partial=False, say=lambda line: None)
    for part, value in job.trainer.parallel.tables.id_state()["item"].items():
        assert torch.equal(same.trainer.parallel.tables.id_state()["item"][part], value), part
    other = make_job("other", tables={**tables, "zch": ("item=lfu:1:12",)})
    fits, _ = compare(read_whole(saved), other.trainer)
    assert not [key for key in fits if ".item." in key]
    with pytest.raises(CheckpointError, match="does not fit this model"):
        start_from(saved, other.trainer, partial=False, say=lambda line: None)


def test_the_room_that_is_asked_for_counts_maps_and_moments_of_parts(make_job, take_steps):
    """Between two rounds, when no id is waiting, a checkpoint holds what is expected."""
    tables = {
        "policies": ("item=zch", "ads.item=zch"),
        "zch": ("item=lru:1:12",),
        "sharding": ("item=column_wise:2",),
    }
    job = make_job(tables=tables)
    take_steps(job, 1)
    tensors = checkpoint.capture(job.trainer, job.loader).tensors
    assert tensors["ids.item.ids"].nbytes == 12 * 8
    assert tensors["tables.item.momentum"].shape == (12, 2)
    assert expected_bytes(job.trainer) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policies": ("item=zch",)}, r"all its features need that policy; missing: ads\.item=zch"),
        ({"zch": ("item=lru:4",)}, "none of whose features has the policy zch"),
    ],
)
def test_features_of_a_table_must_agree(make_job, given, words):
    with pytest.raises(ConfigError, match=words):
        make_job(tables=given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("item", "expected table=eviction:interval"),
        ("item=fifo:3", "did you mean|valid"),
        ("item=lru", "expected eviction:interval or eviction:interval:rows"),
        ("item=lru:0", "expected eviction:interval or eviction:interval:rows"),
    ],
)
def test_settings_that_are_none(given, words):
    with pytest.raises(ConfigError, match=words):
        TablesConfig(zch=(given,))


def test_the_recipe_is_complete():
    config = find_recipe("dynamic_cpu")
    assert config.tables.zch_of()["item"] == ("distance_lfu", 50, 601)
    assert set(config.tables.open_ids()) == {"item", "ads.item", "organic.item", "search.item"}
