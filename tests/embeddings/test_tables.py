"""Every implementation of the tables against the shipped conformance suite, one process and two."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gem_embeddings import initial, testing, torchrec_tables
from gem_embeddings.api import build_tables
from gem_embeddings.interface import PlannerInputs, RowWiseAdagrad, TableSpec
from gem_embeddings.planned import plan_tables
from gem_embeddings.reference import rowwise_adagrad_
from gem_embeddings.testing import CHECKS, CONFIGURED_CHECKS, SPECS, Quirks
from gem_embeddings.torchrec_tables import _Collections

ROW_WISE = {spec.name: "row_wise" for spec in SPECS}


def factory_of(impl, sharding=None):
    def factory(specs, optimizer, seed):
        return build_tables(specs, optimizer=optimizer, seed=seed, impl=impl, sharding=sharding)

    return factory


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("impl", ["reference", "torchrec"])
def test_conformance(one_process, impl, check):
    check(factory_of(impl), Quirks())


@pytest.mark.parametrize("check", CONFIGURED_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("impl", ["reference", "torchrec"])
def test_conformance_configured(one_process, impl, check):
    def factory(specs, optimizer, seed, *, policies=None, managed=None):
        return build_tables(specs, optimizer=optimizer, seed=seed, impl=impl, policies=policies, managed=managed)

    check(factory, Quirks())


def test_exchange_of_one(one_process):
    testing.check_exchange(testing.GroupExchange(dist.group.WORLD))


def test_conformance_row_wise(one_process):
    testing.check_training(factory_of("torchrec", ROW_WISE), Quirks())


def test_world_of_one_is_the_ranks_check(one_process):
    testing.check_ranks(factory_of("torchrec"), Quirks(), 0, 1)


@pytest.mark.distributed
def test_two_ranks_train_as_one(run_ranks):
    run_ranks(Path(__file__).with_name("ranks_worker.py"), 2, timeout_s=120)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 0}, "rows >= 1"),
        ({"dim": 6}, "multiple of 4"),
        ({"pooling": "max"}, "pooling must be one of"),
        ({"features": ("x", "x")}, "given twice"),
        ({"name": "one"}, "given twice"),
    ],
)
def test_bad_specs(changes, words):
    good = TableSpec(name="one", rows=3, dim=4, features=("x",))
    second = TableSpec(**({"name": "two", "rows": 3, "dim": 4, "features": ("y",)} | changes))
    with pytest.raises(ValueError, match=words):
        build_tables([good, second], optimizer=RowWiseAdagrad(), seed=0, impl="reference")


def test_bad_arguments():
    specs = [TableSpec(name="one", rows=3, dim=4, features=("x",))]
    with pytest.raises(ValueError, match="impl must be one of"):
        build_tables(specs, optimizer=RowWiseAdagrad(), seed=0, impl="fast")
    with pytest.raises(ValueError, match="eps > 0"):
        build_tables(specs, optimizer=RowWiseAdagrad(eps=0.0), seed=0, impl="reference")
    with pytest.raises(ValueError, match="names table 'two'"):
        build_tables(specs, optimizer=RowWiseAdagrad(), seed=0, impl="reference", sharding={"two": "row_wise"})


def test_torchrec_needs_a_process_group(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    specs = [TableSpec(name="one", rows=3, dim=4, features=("x",))]
    with pytest.raises(ValueError, match="init_process_group"):
        build_tables(specs, optimizer=RowWiseAdagrad(), seed=0, impl="torchrec")


def test_worked_example_of_the_reference_optimizer():
    weight, momentum = torch.zeros(4, 2), torch.zeros(4)
    rowwise_adagrad_(weight, momentum, torch.tensor([3, 3]), torch.tensor([[1.0, 1.0], [2.0, 0.0]]), lr=0.1, eps=1e-12)
    assert momentum.tolist() == [0, 0, 0, 5]
    torch.testing.assert_close(weight[3], -0.1 * torch.tensor([3.0, 1.0]) / 5**0.5)
    assert not weight[:3].any()


def test_start_values_do_not_depend_on_the_shard():
    spec = TableSpec(name="big", rows=initial.BLOCK_ROWS + 10, dim=4, features=("x",), init_std=0.5)
    whole = initial.initial_rows(spec, seed=1, start=0, stop=spec.rows)
    start = initial.BLOCK_ROWS - 3
    assert torch.equal(initial.initial_rows(spec, seed=1, start=start, stop=spec.rows), whole[start:])
    assert abs(float(whole.std()) - 0.5) < 0.01
    assert not torch.equal(whole[:10], initial.initial_rows(spec, seed=2, start=0, stop=10))


def test_the_readme_example_runs():
    readme = Path(initial.__file__).parents[1] / "README.md"
    code = readme.read_text().split("```python\n")[1].split("```")[0]
    assert "\nassert " in code, "the example must check what it shows"
    exec(compile(code, str(readme), "exec"), {})


def test_the_planner_places_tables_within_constraints_and_memory(one_process):
    """The large table is cut and the small one whole; what is given stays; what does not fit is said."""
    specs = [
        TableSpec(name="big", rows=10_000_000, dim=64, features=("a",)),
        TableSpec(name="mid", rows=1_000_000, dim=64, features=("b", "c")),
        TableSpec(name="small", rows=3, dim=64, features=("d",)),
        TableSpec(name="bags", rows=500_000, dim=64, features=("e",), pooling="mean"),
    ]
    inputs = PlannerInputs(rows_per_rank=2048, mean_ids={"a": 50.0}, memory_bytes=1.5e9, host_memory_bytes=1.5e9)

    def decide(inputs, given):
        found = plan_tables(_Collections(specs), specs, inputs=inputs, ranks=4, host=4, device="cpu", given=given)
        return {name: layout.shards[0].rank if layout.kind == "table_wise" else None for name, layout in found.items()}

    found = decide(inputs, {})
    assert found["big"] is None  # 2.6 GB in ranks of 1.5 GB
    assert found["small"] in range(4)  # 3 rows cannot be cut over 4 ranks
    assert found == decide(inputs, {}), "another plan on another rank"
    assert decide(inputs, {"mid": "table_wise"})["mid"] in range(4)
    assert decide(inputs, {"mid": "row_wise"})["mid"] is None
    with pytest.raises(ValueError, match=r"no place for the tables on 4 ranks with 2e\+08 bytes"):
        decide(dataclasses.replace(inputs, memory_bytes=2e8, host_memory_bytes=2e8), {})


@pytest.mark.parametrize("kind", ["table_row_wise", "grid"])
def test_the_planners_hosts_are_those_of_the_job(one_process, kind):
    """8 ranks on hosts of 4: a plan over all 8 would let the lookups of a host's table look on the wrong ranks."""
    specs = [TableSpec(name=name, rows=800, dim=8, features=(name,), pooling="sum") for name in "ab"]
    inputs = PlannerInputs(rows_per_rank=8, ranks_per_host=8)

    def plan(given, ranks_per_host=8, host=4):
        told = dataclasses.replace(inputs, ranks_per_host=ranks_per_host)
        return plan_tables(_Collections(specs), specs, inputs=told, ranks=8, host=host, device="cpu", given=given)

    with pytest.raises(ValueError, match=r"told of 8 ranks a host .* runs with 4 a host, and 'a' .* 4 ranks a host"):
        plan({"a": kind, "b": "row_wise"})
    assert len({shard.rank // 4 for shard in plan({"a": "table_row_wise"}, ranks_per_host=4)["a"].shards}) == 1
    assert len(plan({"a": "table_row_wise"}, ranks_per_host=16, host=8)["a"].shards) == 8
    assert plan({"a": "row_wise"})["a"].kind == "row_wise"  # no table lies on a host


def test_tables_made_with_the_planner_know_the_hosts_of_the_job(one_process, monkeypatch):
    monkeypatch.setattr(torchrec_tables, "ranks_of_a_host", lambda group: 4)
    with pytest.raises(ValueError, match=r"told of 1 ranks a host .* runs with 4 a host, and 'tag'"):
        build_tables(
            SPECS,
            optimizer=RowWiseAdagrad(),
            seed=0,
            sharding={"tag": "grid"},
            planner=PlannerInputs(rows_per_rank=8),
        )


def test_planned_tables_train_as_others(one_process):
    def planned(specs, optimizer, seed):
        return build_tables(specs, optimizer=optimizer, seed=seed, planner=PlannerInputs(rows_per_rank=8))

    testing.check_training(planned, Quirks())
    assert planned(SPECS, testing.OPTIMIZER, 0).placement().keys() == {spec.name for spec in SPECS}


def test_placement_is_named(one_process):
    tables = build_tables(SPECS, optimizer=RowWiseAdagrad(), seed=0, sharding={"item": "row_wise"})
    assert tables.placement() == {
        "item": "rows over 1 ranks",
        "shop": "whole on rank 0",
        "tag": "whole on rank 0",
        "word": "whole on rank 0",
    }


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "above 0"), (1.5, "at most 1"), (0.2, "needs CUDA, the device is 'cpu'")]
)
def test_a_cache_that_cannot_be(one_process, share, words):
    with pytest.raises(ValueError, match=words):
        build_tables(SPECS, optimizer=RowWiseAdagrad(), seed=0, cache_share=share)
