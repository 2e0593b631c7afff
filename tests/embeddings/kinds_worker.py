"""One rank of test_kinds.py, with the number of ranks per host; started by run_rank.py. A failure is a traceback."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from gem_embeddings import testing
from gem_embeddings.api import SHARDINGS, build_tables
from gem_embeddings.interface import ManagedIds, Replicas
from gem_embeddings.reference import ReferenceTables
from gem_embeddings.testing import OPTIMIZER, SEED, SPECS, GroupExchange, Quirks, make_ids, part_of, train_step
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

MANAGED = {
    "item": ManagedIds(policy="distance_lfu", interval=2),
    "tag": ManagedIds(policy="lru", interval=3),
    "word": ManagedIds(policy="lfu", interval=1),
}
# fewer rows than ids, so that ids are evicted
FEW = tuple(dataclasses.replace(spec, rows=7) if spec.name in MANAGED else spec for spec in SPECS)
MANAGED_FEATURES = [feature for spec in SPECS if spec.name in MANAGED for feature in spec.features]
ROWS = 13


def make_factory(sharding, **options):
    def factory(specs, optimizer, seed):
        return build_tables(specs, optimizer=optimizer, seed=seed, sharding=sharding, **options)

    return factory


def every_kind(rank: int, world_size: int) -> None:
    """Each kind for all tables that can be cut so, and a mixture: one process's model (with as many column parts)."""
    mixed = {"item": "column_wise", "shop": "data_parallel", "tag": "grid", "word": "table_row_wise"}
    for sharding in (*(testing.shardable(kind) for kind in SHARDINGS), mixed):
        quirks = Quirks(column_parts=testing.parts_of(sharding))
        testing.check_start_values(make_factory(sharding), quirks)
        testing.check_ranks(make_factory(sharding), quirks, rank, world_size)


def kinds_in_copies(groups, rank: int, world_size: int) -> None:
    """Columns cut, in whole and in fully sharded copies; what needs the whole job is refused by name."""
    group, exchange = groups
    sharding = testing.shardable("column_wise")
    quirks = Quirks(column_parts=testing.parts_of(sharding))
    for fully_sharded in (False, True):
        replicas = Replicas(exchange=exchange, fully_sharded=fully_sharded)
        testing.check_ranks(make_factory(sharding, process_group=group, replicas=replicas), quirks, rank, world_size)
    for kind, words in (("grid", "grid cuts over the ranks of a host"), ("data_parallel", "from rank 0 of the job")):
        with pytest.raises(ValueError, match=f"table 'tag': .*{words}"):
            make_factory({"tag": kind}, process_group=group, replicas=Replicas(exchange=exchange))(
                SPECS, OPTIMIZER, SEED
            )


def large(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same batch with managed ids far apart."""
    values = list(ids.values().split(ids.length_per_key()))
    for number, key in enumerate(ids.keys()):
        if key in MANAGED_FEATURES:
            values[number] = values[number] * 1_000_000_007 - 3
    return KeyedJaggedTensor(keys=ids.keys(), values=torch.cat(values), lengths=ids.lengths())


def same_maps(found, expected) -> None:
    assert found.keys() == expected.keys() == MANAGED.keys()
    for table, parts in expected.items():
        assert found[table].keys() == parts.keys()
        for key, value in parts.items():
            assert torch.equal(found[table][key], value), (table, key, found[table][key], value)


def close_tables(found, expected) -> None:
    for table, parts in expected.items():
        for key, value in parts.items():
            torch.testing.assert_close(found[table][key].double(), value.double(), rtol=1e-5, atol=1e-6)


def managed(groups, rank: int, world_size: int) -> None:
    """The map of one process to the bit, whatever the sharding and the copies; saved in the middle of a round, it goes
    on in one process, and from one process here.
    """
    group, exchange = groups
    own_group = {"process_group": group}
    ways = [
        ({}, {}),
        ({"item": "row_wise", "tag": "column_wise", "word": "data_parallel"}, {}),
        ({}, {**own_group, "replicas": Replicas(exchange=exchange)}),
        ({"tag": "column_wise"}, {**own_group, "replicas": Replicas(exchange=exchange, fully_sharded=True)}),
        ({}, {**own_group, "replicas": Replicas(exchange=exchange, sync="average", fully_sharded=True)}),
        ({}, {**own_group, "replicas": Replicas(exchange=exchange, sync="average", every=2)}),
    ]
    for sharding, options in ways:
        exact = options.get("replicas") is None or options["replicas"].sync == "gradients"

        def make(seed, sharding=sharding, options=options):
            return build_tables(FEW, optimizer=OPTIMIZER, seed=seed, sharding=sharding, managed=MANAGED, **options)

        def alone(sharding=sharding):
            parts = testing.parts_of(sharding)
            return ReferenceTables(FEW, optimizer=OPTIMIZER, seed=SEED, alone=True, managed=MANAGED, column_parts=parts)

        tables, one, prepared = make(SEED), alone(), None
        bounds = [0, 3, *[5 + 2 * r for r in range(world_size - 2)], ROWS]  # unequal parts

        def part(step, bounds=bounds):
            return part_of(large(make_ids(ROWS, seed=step)), bounds[rank], bounds[rank + 1])

        for step in range(7):
            if step == 4:  # an evaluation in between
                with torch.no_grad():
                    tables.look_up(tables.prepare(part(100)))
            ahead = part(step + 1) if step % 3 else None
            prepared = train_step(
                tables, part(step), first_row=bounds[rank], scale=world_size / ROWS, prepared=prepared, ahead=ahead
            )
            train_step(one, large(make_ids(ROWS, seed=step)), scale=1 / ROWS)
        same_maps(tables.id_state(), one.id_state())
        if exact:
            close_tables(tables.table_state(), one.table_state())
        counts, expected = tables.policy_counts(), one.policy_counts()
        for feature in MANAGED_FEATURES:
            assert counts[feature]["evicted"] == expected[feature]["evicted"], feature
            assert counts[feature]["inserted"] == expected[feature]["inserted"], feature
        assert counts["item"]["evicted"] > 0, counts
        # 7 steps: rounds of 2 and of 3 are under way
        saved, maps = tables.table_state(), tables.id_state()
        assert all(maps[name]["seen_ids"].numel() for name in ("item", "tag"))
        again, single = make(SEED), alone()
        for model in (again, single):
            model.load_table_state(saved)
            model.load_id_state(maps)
        same_maps(again.id_state(), maps)
        for step in range(7, 10):
            for model in (tables, again):
                train_step(model, part(step), first_row=bounds[rank], scale=world_size / ROWS)
            train_step(single, large(make_ids(ROWS, seed=step)), scale=1 / ROWS)
        same_maps(again.id_state(), tables.id_state())
        same_maps(single.id_state(), tables.id_state())
        if exact:
            close_tables(again.table_state(), single.table_state())


def main(rank: int, world_size: int, init_method: str, host: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = host  # what torchrun would say
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    grid = torch.arange(world_size).view(2, world_size // 2)
    mine = {}
    for kind, rows in (("copy", grid), ("exchange", grid.t())):
        for ranks in rows.tolist():
            group = dist.new_group(ranks)
            if rank in ranks:
                mine[kind] = group
    groups = mine["copy"], GroupExchange(mine["exchange"])
    every_kind(rank, world_size)
    kinds_in_copies(groups, rank, world_size)
    managed(groups, rank, world_size)
    dist.destroy_process_group()
