"""The list of cases: complete, recorded, and with checks that catch a wrong result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from cases import all_cases, find, prepare
from cases.case import Case
from gate_limits import read_limits

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in all_cases()}
RECORD = json.loads((ROOT / "benchmarks" / "results" / "counters.json").read_text())["cases"]


def test_all_packages_have_cases():
    folders = [*ROOT.glob("packages/*/gem_*"), ROOT / "datasets" / "gem_datasets", ROOT / "pipelines" / "gem_pipelines"]
    assert {folder.name.removeprefix("gem_") for folder in folders} <= {case.package for case in CASES.values()}


def test_jagged_cases_come_in_pairs_or_are_ragged():
    uniform = {name.removesuffix("_uniform") for name in CASES if name.endswith("_uniform")}
    ragged = {name.removesuffix("_ragged") for name in CASES if name.endswith("_ragged")}
    assert uniform <= ragged
    assert uniform


def test_every_case_is_recorded_and_nothing_else():
    assert RECORD.keys() == CASES.keys(), "run: python ci/gate.py record --counters-only"
    assert all(figures for figures in RECORD.values())


def test_limits_name_figures_that_exist():
    limits = read_limits(ROOT / "ci" / "limits.toml")
    assert {key.partition("/")[0] for key in limits.counters} <= CASES.keys()
    assert all(key.partition("/")[2] in RECORD[key.partition("/")[0]] for key in limits.counters)
    assert set(limits.times) <= {name for name, case in CASES.items() if case.timed}


def test_a_bad_name_is_refused():
    with pytest.raises(ValueError, match="two identifiers"):
        dataclasses.replace(find("pipelines.auc"), name="pipelines.a.b")
    with pytest.raises(ValueError, match=r"no case named 'x\.y'; there are imports\.attention"):
        find("x.y")


def spoil_first(result):
    return (result[0] + 1e-3, *result[1:])


def spoil_last(result):
    return (*result[:-1], result[-1] + 1e-3)


def spoil_batches(batches):
    batches[1].ids["views.item"].values()[5] += 1
    return batches


def spoil_vectors(result):
    return {**result, "tags": result["tags"] + 1e-4}


def spoil_auc(result):
    return (result[0] + 1e-9, result[1])


def spoil_gauc(result):
    return (result[0], dataclasses.replace(result[1], gauc=result[1].gauc + 1e-9))


def spoil_checkpoint(read):
    next(iter(read.tensors.values()))[3, 4] += 1e-6
    return read


def spoil_loss(record):
    return {**record, "loss": record["loss"] * 1.001}


def spoil_ledger(directory):
    (path,) = directory.iterdir()
    table = pq.read_table(path)
    pq.write_table(table.take([1, 0, *range(2, len(table))]), path)
    return directory


def spoil_division(rows):
    return (rows[1][:1], *rows[1:])


def spoil_order(order):
    order[[0, 1]] = order[[1, 0]]
    return order


def spoil_exchange(batch):
    batch.streams["views"].times[-1] += 1
    return batch


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("attention.hstu_eager_ragged", spoil_first),
        ("attention.softmax_eager_uniform", spoil_last),
        ("attention.gdpa_eager_ragged", spoil_last),
        ("attention.seeds_eager_uniform", spoil_first),
        ("data.epoch_shuffled_ragged", spoil_batches),
        ("data.epoch_in_order_ragged", lambda batches: batches[:-1]),
        ("data.partition_lpt", spoil_division),
        ("data.partition_kk", lambda rows: rows[::-1][:-1]),
        ("data.base_batch_order", spoil_order),
        ("data.exchange_ragged", spoil_exchange),
        ("datasets.synthetic_ragged", lambda data: dataclasses.replace(data, train=data.train.slice(1))),
        ("embeddings.train_reference_ragged", spoil_vectors),
        ("pipelines.auc", spoil_auc),
        ("pipelines.auc", spoil_gauc),
        ("pipelines.checkpoint", spoil_checkpoint),
        ("pipelines.checkpoint_hash", lambda hashes: hashes[::-1]),
        ("pipelines.checkpoint_incremental", lambda result: (False, result[1])),
        ("pipelines.gradient_check", lambda largest: largest * 1.0001),
        ("pipelines.ledger", spoil_ledger),
        ("pipelines.validation_ragged", lambda totals: dataclasses.replace(totals, rows=totals.rows - 1)),
        ("pipelines.step_uniform", spoil_loss),
    ],
)
def test_checks_bite(name, spoil):
    """A right result passes, one wrong in a single place does not."""
    case = find(name)
    prepare(case)
    inputs = case.make()
    with pytest.raises(AssertionError):
        case.check(inputs, spoil(case.run(inputs)))


def test_nothing_is_measured_after_a_failed_check():
    measured = []

    def fail(inputs, result):
        raise AssertionError("wrong")

    case = Case(name="a.b", make=dict, run=lambda inputs: None, check=fail, count=lambda i, r: measured.append(1))
    with pytest.raises(AssertionError, match="wrong"):
        prepare(case)
    assert measured == []


def test_figures_are_the_same_twice():
    case = find("attention.gdpa_eager_ragged")
    inputs = prepare(case)
    torch.manual_seed(0)
    assert case.count(inputs, case.run) == case.count(inputs, case.run)
