"""Bytes by hand, and against those counted while FSDP2 and expert-parallel layers run (gloo)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from gem_comm.interface import MeshSpec
from gem_pipelines.errors import ConfigError
from gem_pipelines.model.build import build_model
from gem_pipelines.model.testing import KINDS, make_config, make_schema
from gem_pipelines.planner.moves import bytes_by_axis, moves_of, table_bytes, touched_rows
from gem_pipelines.planner.workload import (
    ExpertGroup,
    TableLoad,
    Unit,
    Workload,
    dense_units,
    experts_of,
    owned_experts,
    padded_shard,
)

EXPERTS = ExpertGroup(shapes=(((4, 2),), ((6, 2),)), in_elements=5, out_elements=3)
WORK = Workload(
    name="hand",
    units=(
        Unit(name="layers.0", shapes=((5, 3), (4,)), experts=EXPERTS),
        Unit(name="root", shapes=((3, 2),), root=True),
    ),
    tables=(
        TableLoad(name="a", rows=10, dim=4, ids=2.0, vectors=2.0),
        TableLoad(name="b", rows=6, dim=4, ids=4.0, vectors=1.0),
    ),
    batch=8,
    forward_flops=1e3,
    backward_flops=2e3,
    flops_spread=0.0,
    activation_bytes=100.0,
)


def sent(moves):
    return {(move.axis, move.kind, move.what): move.sent for move in moves}


def test_padded_shard():
    assert padded_shard(((5, 3), (4,)), 2) == 3 * 3 + 2
    assert padded_shard(((5, 3), (4,)), 1) == 19
    assert padded_shard(((1,),), 4) == 1  # one rank holds it, the others a filling


def test_one_rank_moves_nothing():
    assert moves_of(WORK, MeshSpec()) == ()


def test_shard_and_replicate_by_hand():
    found = sent(moves_of(WORK, MeshSpec(shard=2, replicate=2, table_shard=4)))
    layer = 3 * 3 + 2 + 2 * 2 + 3 * 2  # half of (5, 3), (4,), (4, 2), (6, 2), filled up
    assert found["shard_expert", "all_gather", "parameters of layers.0"] == 2 * layer * 4
    assert found["shard_expert", "reduce_scatter", "gradients of layers.0"] == layer * 4
    assert found["replicate", "all_reduce", "gradients of layers.0"] == 2 * layer * 4 // 2
    assert found["shard_expert", "all_gather", "parameters of root"] == 2 * 2 * 4


@pytest.mark.parametrize(("rank", "rows"), [(0, 4), (1, 6)])
def test_experts_by_hand(rank, rows):
    found = sent(moves_of(WORK, MeshSpec(expert=2, shard=2, table_shard=4), expert_rank=rank))
    shared = 2 * 3 + 1  # a quarter of (5, 3) and (4,)
    assert found["shard_expert", "all_gather", "parameters of layers.0"] == 2 * 3 * shared * 4
    own = rows // 2 * 2
    assert found["shard", "all_gather", f"parameters of expert {rank} of layers.0"] == 2 * own * 4
    assert found["shard", "reduce_scatter", f"gradients of expert {rank} of layers.0"] == own * 4
    activations = {k: v for k, v in found.items() if k[0] == "expert"}
    assert sorted(activations.values()) == sorted([8 * 5 * 4, 8 * 5 * 4, 8 * 3 * 4, 8 * 3 * 4])


def test_tables_by_hand():
    plain = sent(moves_of(WORK, MeshSpec(shard=4, table_shard=2, table_replica=2), sync_every=4))
    assert plain["table_shard", "all_to_all", "ids"] == 8 / 2 * (6 * 8 + 2 * 8)
    assert plain["table_shard", "all_to_all", "embedding vectors"] == 8 / 2 * (3 * 4 * 4)
    whole = 16 * (4 * 4 + 4)
    assert table_bytes(WORK) == whole
    assert plain["table_replica", "all_reduce", "averages of tables"] == 2 * (whole / 2) / 2 / 4
    spec = MeshSpec(shard=4, table_shard=2, table_replica=2, fully_sharded=True)
    full = sent(moves_of(WORK, spec))
    assert full["table_replica", "all_gather", "slices of tables"] == 2 * (whole / 2) / 2
    assert full["table_replica", "reduce_scatter", "updated tables"] == (whole / 2) / 2
    assert sent(moves_of(WORK, spec, table_gathers=1))["table_replica", "all_gather", "slices of tables"] == whole / 4


def test_bytes_by_axis_adds_up():
    moves = moves_of(WORK, MeshSpec(expert=2, shard=2, replicate=2, table_shard=4, table_replica=2))
    assert sum(bytes_by_axis(moves).values()) == pytest.approx(sum(move.sent for move in moves))
    assert set(bytes_by_axis(moves)) == {
        "expert", "shard", "shard_expert", "replicate", "table_shard", "table_replica",
    }  # fmt: skip


def test_experts_that_cannot_be_divided():
    with pytest.raises(ConfigError, match="3 experts cannot be divided over expert=2; use a divisor of 3"):
        owned_experts(3, 2, 0)
    assert [list(owned_experts(6, 2, e)) for e in (0, 1)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_units_hold_every_parameter_once(kind):
    model = build_model(make_schema(), KINDS[kind], seed=0)
    layers = list(model.layers)
    units = dense_units(model, in_out=[(1, 1)] * len(layers))
    total = sum(p.numel() for p in model.parameters())
    work = dataclasses.replace(WORK, units=units)
    assert work.dense_parameters == total
    assert units[-1].root
    own = KINDS[kind].interaction
    count = {"dhen": len(own.members), "experts": own.experts, "wukong": 0}[own.kind]
    assert [unit.experts is not None for unit in units[:-1]] == [count > 0] * len(layers)
    assert work.experts == max(1, count)
    for layer in layers:
        for name, member in experts_of(layer):
            assert layer.get_submodule(name) is member


def test_experts_on_parts_send_what_others_read():
    """Two ranks, parts of 6 and 4 numbers, 8 out, batch 3 of 4-byte numbers.

    Rank 0 sends what rank 1's expert reads (4) and rank 1's rows of what it made itself (4); backward the gradient of
    what the other made (4), and of what it read for the other (6).
    """
    group = ExpertGroup(shapes=(((4, 2),), ((6, 2),)), in_elements=10, out_elements=8, parts=(6, 4))
    work = dataclasses.replace(WORK, units=(Unit(name="layer", shapes=((4,),), experts=group),), batch=3)
    for rank, expected in ((0, [4, 4, 4, 6]), (1, [6, 4, 4, 4])):
        moves = moves_of(work, MeshSpec(expert=2, table_shard=2), expert_rank=rank)
        own = [move for move in moves if move.axis == "expert"]
        assert [move.sent / 3 / 4 for move in own] == expected
        assert {move.kind for move in own} == {"all_to_all"}
        assert not any(move.hidden for move in own)


def test_touched_rows_worked_example():
    table = TableLoad(name="t", rows=100, dim=4, ids=1.0, vectors=1.0)
    work = dataclasses.replace(WORK, batch=100)
    assert touched_rows(work, table, 1) == pytest.approx(100 * (1 - 0.99**100))
    assert round(touched_rows(work, table, 1)) == 63
    assert round(touched_rows(work, dataclasses.replace(table, rows=10**6), 1)) == 100
    assert touched_rows(work, dataclasses.replace(table, rows=1), 1) == 1.0


def test_copies_that_exchange_gradients():
    """Touched rows with their gradients for whole copies, weights once each way for fully sharded ones."""
    table = TableLoad(name="t", rows=100, dim=4, ids=1.0, vectors=1.0)
    work = dataclasses.replace(WORK, tables=(table,), batch=100)
    plain, sliced = (
        {
            move.kind: move
            for move in moves_of(work, MeshSpec(replicate=2, table_replica=2, fully_sharded=f), table_sync="gradients")
            if move.axis == "table_replica"
        }
        for f in (False, True)
    )
    assert plain["all_gather"].sent == pytest.approx(touched_rows(work, table, 1) * (4 * 4 + 8))
    assert {kind: move.sent for kind, move in sliced.items()} == {"all_gather": 800.0, "reduce_scatter": 800.0}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_planned_bytes_equal_counted_bytes(run_ranks, world_size):
    """FSDP2 and HSDP of the whole model, expert-parallel layers, and table copies; see counted_worker.py."""
    run_ranks(Path(__file__).with_name("counted_worker.py"), world_size)


def test_the_model_that_is_counted_has_odd_shapes():
    """Padding would not be seen if every dim 0 were a multiple of the ranks."""
    shapes = [tuple(p.shape) for p in build_model(make_schema(), make_config(), seed=0).parameters()]
    assert any(shape[0] % 2 for shape in shapes)
