"""One rank of the tests of copies; started by run_rank.py. A failure is a traceback."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gem_embeddings import testing
from gem_embeddings.api import build_tables
from gem_embeddings.interface import Replicas, RowWiseAdagrad, TableSpec
from gem_embeddings.reference import ReferenceTables
from gem_embeddings.testing import SEED, SPECS, GroupExchange, Quirks, make_ids, part_of, train_step

ROW_WISE = {spec.name: "row_wise" for spec in SPECS}


def groups(shard: int, copies: int, *, strided: bool):
    """This rank's (copy's group, its ranks, exchange over the copies); strided: copies are ranks 0, M, 2 M, ..."""
    world = torch.arange(shard * copies)
    grid = world.view(shard, copies).t() if strided else world.view(copies, shard)  # (copy, place in the copy)
    mine = {}
    for kind, rows in (("copy", grid), ("exchange", grid.t())):
        for ranks in rows.tolist():
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine[kind] = group
    return mine["copy"], [list(ranks) for ranks in grid.tolist()], GroupExchange(mine["exchange"])


def make_factory(group, replicas, sharding=None):
    def factory(specs, optimizer, seed):
        return build_tables(
            specs, optimizer=optimizer, seed=seed, process_group=group, replicas=replicas, sharding=sharding
        )

    return factory


def exact(shard: int, copies: int, rank: int) -> None:
    """Both exact ways, whole and sliced: the model of one process; copies equal to the bit; memory given back."""
    for strided in (False, True) if min(shard, copies) > 1 else (False,):
        group, _, exchange = groups(shard, copies, strided=strided)
        for fully_sharded in (False, True):
            replicas = Replicas(exchange=exchange, fully_sharded=fully_sharded)
            for sharding in (None, ROW_WISE):
                testing.check_ranks(make_factory(group, replicas, sharding), Quirks(), rank, shard * copies)
            testing.check_start_values(make_factory(group, replicas), Quirks())
            tables = make_factory(group, replicas)(SPECS, RowWiseAdagrad(lr=0.1), SEED)
            for step in range(3):
                train_step(tables, part_of(make_ids(9, seed=step), rank, rank + 2), scale=0.3)
                with torch.no_grad():
                    tables(make_ids(2, seed=step))
                testing.check_copies(tables, replicas)
            if fully_sharded:
                assert tables._copies.memory.held_bytes == 0
                kept = sum(own.numel() for own in tables._copies._weight.own)
                whole = sum(rows * dim for rows, dim in tables._copies._weight.shapes)
                assert kept <= whole / copies + sum(dim for _, dim in tables._copies._weight.shapes)
            for name, entry in tables.table_state().items():
                for key, value in entry.items():
                    every = exchange.all_gather(value.flatten()).view(copies, -1)
                    assert bool((every == every[0]).all()), (name, key)


def ranks_without_a_table(shard: int, copies: int, rank: int) -> None:
    """Table-wise with more ranks than tables: a rank without a table has nothing in copy, and its copies neither."""
    group, _, exchange = groups(shard, copies, strided=False)
    replicas = Replicas(exchange=exchange)
    spec = TableSpec(name="t", rows=5, dim=4, features=("f",))
    tables = build_tables(
        [spec],
        optimizer=RowWiseAdagrad(),
        seed=0,
        process_group=group,
        replicas=replicas,
        sharding={"t": "table_wise"},
    )
    shown = testing.GroupExchange(dist.group.WORLD).all_gather(torch.tensor([len(tables.copied_parts())]))
    assert shown.tolist().count(0) == copies * (shard - 1), shown
    testing.check_copies(tables, replicas)
    tables.copied_parts = dict
    with pytest.raises(AssertionError, match="is empty on all"):
        testing.check_copies(tables, replicas)


def state_moves_between_ways(shard: int, copies: int, rank: int) -> None:
    """What one way saved another goes on with: the next step is the same."""
    group, _, exchange = groups(shard, copies, strided=False)
    ways = [None, *(Replicas(exchange=exchange, fully_sharded=f) for f in (False, True))]
    made = [
        build_tables(
            SPECS,
            optimizer=RowWiseAdagrad(lr=0.1),
            seed=SEED + number,
            process_group=dist.group.WORLD if way is None else group,
            replicas=way,
        )
        for number, way in enumerate(ways)
    ]
    train_step(made[0], part_of(make_ids(9, seed=0), rank, rank + 2))
    for tables in made[1:]:
        tables.load_table_state(made[0].table_state())
    for tables in made:
        train_step(tables, part_of(make_ids(9, seed=1), rank, rank + 2))
    first = made[0].table_state()
    for tables in made[1:]:
        for name, entry in tables.table_state().items():
            for key, value in entry.items():
                torch.testing.assert_close(value, first[name][key], rtol=1e-5, atol=1e-7)


def averaged(shard: int, copies: int, rank: int) -> None:
    """Averaged copies do what they are defined to do; whole and sliced, with and without scaling, and every 2 steps."""
    group, ranks, exchange = groups(shard, copies, strided=False)
    for options in (
        {},
        {"moment_scaling": False},
        {"every": 2},
        {"fully_sharded": True},
        {"fully_sharded": True, "moment_scaling": False},
    ):
        replicas = Replicas(exchange=exchange, sync="average", **options)
        testing.check_averages(make_factory(group, replicas), Quirks(), replicas, copy_ranks=ranks, rank=rank)


def linear_steps_are_exact(shard: int, copies: int, rank: int) -> None:
    """While moments stand still, averaged copies are one process, with scaling."""
    group, _, exchange = groups(shard, copies, strided=False)
    optimizer, moment, world = RowWiseAdagrad(lr=2000.0, eps=1.0), 1e8, shard * copies
    for fully_sharded in (False, True):
        replicas = Replicas(exchange=exchange, sync="average", fully_sharded=fully_sharded)
        tables = make_factory(group, replicas)(SPECS, optimizer, SEED)
        one = ReferenceTables(SPECS, optimizer=optimizer, seed=SEED, alone=True, dtype=torch.float64)
        state = one.table_state()
        for model in (tables, one):
            model.load_table_state(
                {
                    name: {
                        "weight": entry["weight"].float(),
                        "momentum": torch.full_like(entry["momentum"], moment).float(),
                    }
                    for name, entry in state.items()
                }
            )
        rows = 3 * world
        for step in range(6):
            whole = make_ids(rows, seed=step)
            train_step(tables, part_of(whole, 3 * rank, 3 * rank + 3), first_row=3 * rank, scale=world / rows)
            train_step(one, whole, scale=1 / rows)
        found, expected = tables.table_state(), one.table_state()
        for name in expected:
            moved = (expected[name]["weight"] - state[name]["weight"]).abs().max()
            assert moved > 0.02, (name, moved)
            torch.testing.assert_close(found[name]["weight"].double(), expected[name]["weight"], rtol=1e-5, atol=1e-6)


def rows_of_one_copy(copies: int, rank: int) -> None:
    """A row that one copy meets: its moment is that of one process exactly, its step smaller by the stated factor."""
    group, _, exchange = groups(1, copies, strided=False)
    spec = TableSpec(name="t", rows=copies, dim=4, features=("f",), init_std=0.0)
    optimizer = RowWiseAdagrad(lr=0.1, eps=1e-12)
    replicas = Replicas(exchange=exchange, sync="average")
    tables = build_tables([spec], optimizer=optimizer, seed=0, process_group=group, replicas=replicas)
    ids = testing.KeyedJaggedTensor(keys=["f"], values=torch.tensor([rank]), lengths=torch.tensor([1]))
    g, weight, moment = 0.5, 0.0, 0.0  # g: what one process would see; this copy sees `copies` times that
    for _ in range(4):
        (tables(ids)["f"].sum() * g * copies).backward()
        one_step = 0.1 * g / (moment + g * g) ** 0.5
        weight -= one_step * ((moment + g * g) / (moment + copies * g * g)) ** 0.5
        moment += g * g
    state = tables.table_state()["t"]
    torch.testing.assert_close(state["momentum"], torch.full((copies,), moment), rtol=1e-6, atol=0)
    torch.testing.assert_close(state["weight"], torch.full((copies, 4), weight), rtol=1e-5, atol=0)


def bytes_are_as_stated(copies: int, rank: int) -> None:
    """What SummedCopies sends a step: touched rows, and the three collectives, whatever the size of the table."""
    group, _, exchange = groups(1, copies, strided=False)
    seen = []
    gather = exchange.all_gather
    exchange.all_gather = lambda x: seen.append(x.numel() * x.element_size()) or gather(x)
    spec = TableSpec(name="t", rows=1000, dim=8, features=("f",))
    tables = build_tables(
        [spec], optimizer=RowWiseAdagrad(), seed=0, process_group=group, replicas=Replicas(exchange=exchange)
    )
    touched = 3 + 2 * rank  # ids repeat: rows count once
    ids = torch.arange(touched).repeat(2)
    batch = testing.KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.tensor([ids.numel()]))
    tables(batch)["f"].sum().backward()
    most = 3 + 2 * (copies - 1)
    assert seen == [8, 8 * most, 4 * 8 * most], seen


def one_forward_one_backward(copies: int, rank: int) -> None:
    """A backward of an earlier forward is refused; a forward without backward does no harm."""
    group, _, exchange = groups(1, copies, strided=False)
    tables = make_factory(group, Replicas(exchange=exchange))(SPECS, RowWiseAdagrad(lr=0.1), SEED)
    first = tables(make_ids(3, seed=0))["item"].sum()
    tables(make_ids(3, seed=1))
    with pytest.raises(RuntimeError, match="forward 1 came after forward 2"):
        first.backward()


def main(rank: int, world_size: int, init_method: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    shard = world_size // 2
    ranks_without_a_table(2, shard, rank)
    exact(shard, 2, rank)
    averaged(shard, 2, rank)
    if world_size == 2:
        state_moves_between_ways(1, 2, rank)
        linear_steps_are_exact(1, 2, rank)
        rows_of_one_copy(2, rank)
        bytes_are_as_stated(2, rank)
        one_forward_one_backward(2, rank)
    else:
        exact(1, 4, rank)
        averaged(1, 4, rank)
        rows_of_one_copy(4, rank)
    dist.destroy_process_group()
