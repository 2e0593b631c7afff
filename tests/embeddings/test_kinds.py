"""Every kind of sharding, and managed ids, on several gloo ranks against one process; and how tables are laid out."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gem_embeddings import testing
from gem_embeddings.api import SHARDINGS, build_tables, parse_sharding
from gem_embeddings.interface import PlannerInputs, RowWiseAdagrad, TableSpec
from gem_embeddings.layout import Layout, Shard, check_sharding, place
from gem_embeddings.reference import rowwise_adagrad_
from gem_embeddings.testing import SPECS, Quirks


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "host"),
    [(2, 2), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_ranks(run_ranks, world_size, host):
    """Everything in kinds_worker.py; host: how many ranks count as one machine."""
    run_ranks(Path(__file__).with_name("kinds_worker.py"), world_size, str(host), timeout_s=300)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [*SHARDINGS, "column_wise:1"])
def test_one_process(one_process, kind):
    sharding = testing.shardable(kind)

    def factory(specs, optimizer, seed):
        return build_tables(specs, optimizer=optimizer, seed=seed, sharding=sharding)

    copied = tuple(sharding) if kind == "data_parallel" else ()
    quirks = Quirks(column_parts=testing.parts_of(sharding), copied=copied)
    testing.check_training(factory, quirks)
    testing.check_told(factory, quirks)


def test_cut_columns_are_another_optimizer(one_process):
    """Rows of parts with a moment each move away from those of row-wise AdaGrad, and their moments' mean with them."""
    made = [
        build_tables(SPECS, optimizer=testing.OPTIMIZER, seed=0, sharding=sharding)
        for sharding in ({}, {"item": "column_wise"})
    ]
    for step in range(5):
        for model in made:
            testing.train_step(model, testing.make_ids(8, seed=step))
    whole, cut = (model.table_state()["item"] for model in made)
    assert (whole["weight"] - cut["weight"]).abs().max() > 1e-3  # a hundred times the parity that other kinds keep
    torch.testing.assert_close(cut["momentum"].mean(1), whole["momentum"], rtol=0.1, atol=0.1)


def test_moments_of_parts_have_the_rows_moment_as_mean():
    """Gradients [3, 1] and [1, 1] of columns 0-1: parts' moments 9 and 1, the row's (9 + 1) / 2."""
    weight, moments = torch.zeros(2, 2), torch.zeros(2, 2)
    rowwise_adagrad_(weight, moments, torch.tensor([1]), torch.tensor([[3.0, 1.0]]), lr=0.1, eps=1e-12)
    assert moments.tolist() == [[0, 0], [9, 1]]
    torch.testing.assert_close(weight[1], torch.tensor([-0.1, -0.1]))
    whole, row = torch.zeros(2, 2), torch.zeros(2)
    rowwise_adagrad_(whole, row, torch.tensor([1]), torch.tensor([[3.0, 1.0]]), lr=0.1, eps=1e-12)
    assert row[1] == moments[1].mean() == 5


def tables(**rows):
    return [TableSpec(name=name, rows=count, dim=8, features=(name,), pooling="sum") for name, count in rows.items()]


def test_layouts():
    """Whole tables and column parts largest first to the least loaded rank, host blocks before them."""
    assert {
        name: layout.shards[0].rank for name, layout in place(tables(a=9, b=5, c=4, d=1), {}, ranks=2, host=2).items()
    } == {
        "a": 0,
        "b": 1,
        "c": 1,
        "d": 0,
    }
    found = place(
        tables(a=8, b=6, c=5, d=4, e=9),
        {"a": "column_wise", "b": "grid", "c": "table_row_wise", "d": "data_parallel", "e": "row_wise"},
        ranks=4,
        host=2,
    )
    assert found["b"].shards == (
        Shard(rank=0, first_row=0, rows=3, first_column=0, columns=4),
        Shard(rank=1, first_row=3, rows=3, first_column=0, columns=4),
        Shard(rank=2, first_row=0, rows=3, first_column=4, columns=4),
        Shard(rank=3, first_row=3, rows=3, first_column=4, columns=4),
    )
    assert [(s.rank, s.first_row, s.rows) for s in found["c"].shards] == [(0, 0, 3), (1, 3, 2)]
    assert [(s.rank, s.first_column) for s in found["a"].shards] == [(2, 0), (3, 4)]
    assert found["d"] == Layout(kind="data_parallel", shards=())
    assert [(s.rank, s.rows) for s in found["e"].shards] == [(0, 3), (1, 3), (2, 3), (3, 0)]
    assert [found[name].parts for name in "abcde"] == [2, 2, 1, 1, 1]
    assert [found[name].describe(4) for name in "abcde"] == [
        "2 column parts on ranks 2, 3",
        "2 column parts, rows over ranks 0, 1, 2, 3",
        "rows over ranks 0, 1 of one host",
        "whole on each of 4 ranks",
        "rows over 4 ranks",
    ]


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        ({"a": "column_wise:3"}, "column_wise in 3 parts needs a dim that is a multiple of 12"),
        ({"a": "row_wise"}, "row_wise cuts 5 rows over 4 ranks in blocks of 2, which leaves ranks without rows"),
        ({"s": "grid"}, "TorchRec offers grid to pooled tables only"),
        ({"b": "table_row_wise"}, "leaves ranks without rows"),
    ],
)
def test_tables_that_cannot_be_cut_so(sharding, words):
    specs = [*tables(a=5, b=1), TableSpec(name="s", rows=9, dim=8, features=("s",))]
    with pytest.raises(ValueError, match=words):
        check_sharding(specs, sharding, ranks=4, host=2)
    check_sharding(specs, {"a": "table_row_wise", "s": "column_wise", "b": "data_parallel"}, ranks=4, host=2)


@pytest.mark.parametrize("text", ["rowwise", "row_wise:2", "column_wise:", "column_wise:0", "column_wise:x"])
def test_kinds_that_are_none(text):
    with pytest.raises(ValueError, match="sharding must be one of"):
        parse_sharding(text)
    with pytest.raises(ValueError, match="table 'item': sharding must be one of"):
        build_tables(SPECS, optimizer=RowWiseAdagrad(), seed=0, impl="reference", sharding={"item": text})


def test_state_of_another_cut_is_refused(one_process):
    cut = build_tables(SPECS, optimizer=RowWiseAdagrad(), seed=0, sharding={"item": "column_wise"})
    whole = build_tables(SPECS, optimizer=RowWiseAdagrad(), seed=0)
    assert cut.state_shapes()["item"] == {"weight": (23, 8), "momentum": (23, 2)}
    with pytest.raises(ValueError, match=r"momentum should be \(23,\).*got \(23, 2\).*a moment a part"):
        whole.load_table_state(cut.table_state())


def test_state_takes_one_whole_table_of_device_memory_at_a_time(one_process, monkeypatch):
    """Those of 9 and 5 rows in turn; the one that is whole already takes none."""
    made = build_tables(
        tables(a=9, b=5, whole=40), optimizer=testing.OPTIMIZER, seed=0, sharding={"whole": "data_parallel"}
    )
    live, peaks, zeros = {}, [], torch.zeros

    def counted(*shape, **options):
        tensor = zeros(*shape, **options)
        live[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, live.pop, id(tensor))
        peaks.append(sum(live.values()))
        return tensor

    expected = made.table_state()
    monkeypatch.setattr(torch, "zeros", counted)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as from a device: to other memory
    found = made.table_state()
    assert max(peaks) == 9 * (8 + 1) * 4
    assert found.keys() == expected.keys() == {"a", "b", "whole"}
    for name, parts in expected.items():
        assert parts["weight"].abs().max() > 0
        for key, value in parts.items():
            assert torch.equal(found[name][key], value), (name, key)


def test_the_planner_takes_given_kinds(one_process):
    given = {"item": "column_wise", "shop": "data_parallel", "tag": "table_row_wise"}
    planned = build_tables(
        SPECS, optimizer=RowWiseAdagrad(), seed=0, sharding=given, planner=PlannerInputs(rows_per_rank=8)
    )
    assert planned.placement()["item"] == "2 column parts on ranks 0"
    assert planned.placement()["shop"] == "whole on each of 1 ranks"
    assert planned.placement()["tag"] == "rows over ranks 0 of one host"

    def factory(specs, optimizer, seed):
        return build_tables(
            specs, optimizer=optimizer, seed=seed, sharding=given, planner=PlannerInputs(rows_per_rank=8)
        )

    testing.check_training(factory, Quirks(column_parts={"item": 2}))
