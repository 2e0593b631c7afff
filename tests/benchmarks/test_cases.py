"""The list of cases: complete, recorded, and with checks that catch a wrong result."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import gem_embeddings.reference
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cases import all_cases, find, prepare
from cases.case import Case
from gate_limits import read_limits

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in all_cases()}
TREE = json.loads((ROOT / "benchmarks" / "results" / "counters.json").read_text())
RECORD = TREE["cases"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "ci" / "constraints-cpu.txt").read_text(), re.MULTILINE))


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


def test_the_record_names_all_pinned_versions():
    """Else the gate fails, or passes, for what another numpy calls, and does not say so."""
    assert {"numpy", "pyarrow", "tensordict", "xxhash"} <= PINS.keys()
    assert TREE["versions"] == {"python": "3.11", **PINS}, "run: python ci/gate.py record --counters-only"


LOADED = """
import importlib.metadata, sys
import gem_attention.triton_launch, gem_comm.api, gem_data.api, gem_datasets, gem_embeddings.api, gem_pipelines.cli
import gem_pipelines.ledger, gem_pipelines.trainer
of = importlib.metadata.packages_distributions()
print(*{name for module in {name.partition(".")[0] for name in sys.modules} for name in of.get(module, ())})
"""


@pytest.mark.slow
def test_whatever_the_packages_load_is_pinned():
    """setuptools loads itself into every process of an environment that has it."""
    code = [sys.executable, "-W", "ignore", "-c", LOADED]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    loaded = {name.lower().replace("_", "-") for name in done.stdout.split()} - {"gemline", "setuptools"}
    assert "numpy" in loaded
    assert loaded <= {name.lower().replace("_", "-") for name in PINS}


def test_limits_name_figures_that_exist_and_every_time():
    limits = read_limits(ROOT / "ci" / "limits.toml")
    assert {key.partition("/")[0] for key in limits.counters} <= CASES.keys()
    assert all(key.partition("/")[2] in RECORD[key.partition("/")[0]] for key in limits.counters)
    timed = {name for name, case in CASES.items() if case.timed}
    assert set(limits.times) == timed, "measure the noise of a new case: python ci/gate.py noise --cases NAME"


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


def spoil_requests(batches):
    """An impression of one request becomes the next one's."""
    bounds = batches[0].requests
    bounds[int((bounds.diff() > 1).nonzero()[0]) + 1] -= 1
    return batches


def spoil_windows(windows):
    """The first window is trained in one go with the second, and predicts the third."""
    (first, _), (second, later), *others = windows
    return [([*first, *second], later), *others]


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


def spoil_numbers(decoded):
    decoded[3] += decoded[3].abs().amax() * 0.01
    return decoded


def spoil_layout(placed):
    """Two ranks of different hosts change places in the groups of experts."""
    first, second, *others = placed.groups["expert"]
    swapped = (first[:-1] + second[-1:], second[:-1] + first[-1:], *others)
    return dataclasses.replace(placed, groups={**placed.groups, "expert": swapped})


def spoil_snapshot(taken):
    next(value for key, value in taken.tensors.items() if key.startswith("dense")).view(-1)[0] += 1e-6
    return taken


def spoil_synthetic(data):
    """One event of one row becomes another item."""
    return dataclasses.replace(data, eval=with_column(data.eval, "stream.ads.item", lambda values: values + 1))


def with_column(table, name, change):
    """The table with the values (of lists: the elements) of a column changed."""
    column = table.column(name).combine_chunks()
    if not pa.types.is_list(column.type):
        values = pa.array(change(column.to_numpy()), column.type)
    else:
        elements = pa.array(change(column.flatten().to_numpy()), column.type.value_type)
        values = pa.ListArray.from_arrays(column.offsets, elements)
    return table.set_column(table.column_names.index(name), name, values)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("comm.codec_fp8_ragged", spoil_numbers),
        ("comm.codec_int8_ragged", spoil_numbers),
        ("comm.codec_int8_uniform", spoil_numbers),
        ("comm.layout_4096", spoil_layout),
        ("attention.hstu_eager_ragged", spoil_first),
        ("attention.softmax_eager_uniform", spoil_last),
        ("attention.gdpa_eager_ragged", spoil_last),
        ("attention.seeds_eager_uniform", spoil_first),
        ("data.epoch_shuffled_ragged", spoil_batches),
        ("data.epoch_in_order_ragged", lambda batches: batches[:-1]),
        ("data.requests_ragged", spoil_batches),
        ("data.requests_ragged", spoil_requests),
        ("data.stream_windows", lambda windows: [(trained, later[:-1]) for trained, later in windows]),
        ("data.stream_windows", spoil_windows),
        ("data.epoch_base_ragged", spoil_batches),
        ("data.partition_lpt", spoil_division),
        ("data.partition_kk", lambda rows: rows[::-1][:-1]),
        ("data.base_batch_order", spoil_order),
        ("data.exchange_ragged", spoil_exchange),
        ("datasets.synthetic_ragged", lambda data: dataclasses.replace(data, train=data.train.slice(1))),
        ("datasets.synthetic_ragged", spoil_synthetic),
        ("embeddings.train_reference_ragged", spoil_vectors),
        ("embeddings.train_torchrec_ragged", spoil_vectors),
        ("embeddings.train_torchrec_uniform", spoil_vectors),
        ("pipelines.auc", spoil_auc),
        ("pipelines.auc", spoil_gauc),
        ("pipelines.checkpoint", spoil_checkpoint),
        ("pipelines.checkpoint_hash", lambda hashes: hashes[::-1]),
        ("pipelines.checkpoint_incremental", lambda result: (False, result[1])),
        ("pipelines.checkpoint_snapshot", spoil_snapshot),
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


def test_base_batches_that_stay_where_they_are_are_counted(monkeypatch):
    """A permutation of whole base batches is right, and as uneven as before: the counters say so."""
    case, of_loader = find("data.base_batch_order"), find("data.epoch_base_ragged")
    inputs = case.make()
    moved, read = case.formula(inputs), of_loader.formula(of_loader.make())
    monkeypatch.setattr("gem_data.balance.base_batch_order", lambda loads, **_: np.arange(len(loads)))
    monkeypatch.setattr("gem_data.loader.base_batch_order", lambda loads, **_: np.arange(len(loads)))
    still, in_order = case.formula(inputs), of_loader.formula(of_loader.make())
    assert still["uneven_millionths"] > 3 * moved["uneven_millionths"] > 0
    assert in_order["uneven_millionths"] > 1.5 * read["uneven_millionths"] > 0


def test_a_generator_of_nothing_is_caught():
    """Streams without events, no id and no label but 0: of the right count and in the right order."""
    case = find("datasets.synthetic_ragged")
    data = case.run(case.make())

    def emptied(table):
        for name in table.column_names:
            column = table.column(name)
            if name.startswith("stream."):
                empty = pa.ListArray.from_arrays([0] * (len(table) + 1), pa.array([], column.type.value_type))
                table = table.set_column(table.column_names.index(name), name, empty)
            elif name.startswith(("label.", "id.")):
                table = with_column(table, name, lambda values: values * 0)
        return table

    with pytest.raises(AssertionError, match="not one event a row"):
        case.check(case.make(), dataclasses.replace(data, train=emptied(data.train), eval=emptied(data.eval)))
    still = with_column(with_column(data.train, "label.click", lambda x: x * 0), "id.item", lambda x: x * 0)
    with pytest.raises(AssertionError, match=r"train: not the columns of this seed: id\.item, label\.click$"):
        case.check(case.make(), dataclasses.replace(data, train=still))


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_codec_that_states_its_own_loss_is_caught(codec):
    """Five bits instead of eight, with the bound of five: the bound of the format decides."""

    class FiveBits:
        name = codec

        def encode(self, x_RD):
            self.scale_R1 = x_RD.abs().amax(1, keepdim=True).clamp_min(1e-30) / 15
            return (x_RD / self.scale_R1).round()

        def decode(self, numbers_RD, columns):
            return numbers_RD * self.scale_R1

        def error_bound(self, x_RD):
            return self.scale_R1 * 0.51

    case = find(f"comm.codec_{codec}_ragged")
    inputs = {**case.make(), "codec": FiveBits()}
    with pytest.raises(AssertionError, match=rf"{codec}: \d+ of 524288 numbers are beyond the bound of its format"):
        case.check(inputs, case.run(inputs))


@pytest.mark.parametrize("impl", ["reference", "torchrec"])
def test_a_wrong_reference_of_tables_is_caught(monkeypatch, impl):
    """Half a percent of the learning rate is seen where the reference is measured; TorchRec does not lean on it."""
    right = gem_embeddings.reference.rowwise_adagrad_

    def wrong(*arguments, lr, eps):
        right(*arguments, lr=lr * 1.005, eps=eps)

    monkeypatch.setattr(gem_embeddings.reference, "rowwise_adagrad_", wrong)
    case = find(f"embeddings.train_{impl}_ragged")
    if impl == "torchrec":
        prepare(case)
        return
    with pytest.raises(AssertionError, match="not close"):
        prepare(case)


@pytest.fixture(scope="module")
def three_steps():
    """What one process says of three steps, as lists by name."""
    step = find("pipelines.step_ragged")
    inputs = step.make()
    records = [step.run(inputs) for _ in range(3)]
    return {name: [record[name] for record in records] for name in ("loss", "grad_norm")}


@pytest.mark.parametrize("name", ["pipelines.step_two_ranks_ragged", "pipelines.step_mesh_ragged"])
def test_ranks_must_train_what_one_does(name, three_steps):
    """The check of several processes, on what one process had."""
    case = find(name)
    case.check({}, three_steps)
    for figure, wrong in (("loss", 0), ("loss", 2), ("grad_norm", 1)):
        spoilt = {
            key: [value * (1.0001 if (key, k) == (figure, wrong) else 1) for k, value in enumerate(values)]
            for key, values in three_steps.items()
        }
        with pytest.raises(AssertionError, match=figure):
            case.check({}, spoilt)


def test_the_step_on_a_mesh_is_counted_by_axis():
    """Gathers and reductions of the dense model's parts, its gradients over copies, and what all ranks exchange."""
    figures = RECORD["pipelines.step_mesh_ragged"]
    for kind in ("collectives", "collective_bytes"):
        assert all(figures[f"{kind}.{axis}"] > 0 for axis in ("shard", "replicate", "world"))


@pytest.mark.slow
@pytest.mark.distributed
def test_every_result_of_the_axes_is_compared():
    case = find("comm.axes")
    result = case.run({})
    case.check({}, result)
    for rank in range(4):
        for name in ("gathered", "reduced", "coded", "total"):
            wrong = copy.deepcopy(result)
            wrong["ranks"][rank][name][0][0] += 2.0
            with pytest.raises(AssertionError):
                case.check({}, wrong)


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
