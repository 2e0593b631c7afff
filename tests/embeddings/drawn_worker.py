"""One rank of test_drawn.py, with a file of cases; started by run_rank.py. A failure is a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from gem_embeddings.api import build_tables
from gem_embeddings.interface import Replicas, RowWiseAdagrad, TableSpec
from gem_embeddings.layout import check_sharding
from gem_embeddings.reference import ReferenceTables
from gem_embeddings.testing import GroupExchange, part_of, parts_of
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

OPTIMIZER = RowWiseAdagrad(lr=0.1, eps=1e-6)


def make_exchanges(world_size: int) -> dict[int, tuple[object, GroupExchange]]:
    """Copies -> (this copy's group, exchange over the copies). Groups are made once: a host has few ports."""
    found, copies = {}, 1
    while copies <= world_size:
        grid = torch.arange(world_size).view(copies, world_size // copies)
        for kind, rows in (("copy", grid), ("exchange", grid.t())):
            for ranks in rows.tolist():
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    mine = found.setdefault(copies, {})
                    mine[kind] = group
        copies *= 2
    return {n: (mine["copy"], GroupExchange(mine["exchange"])) for n, mine in found.items()}


def draw(case: dict, seed: int) -> KeyedJaggedTensor:
    """A global batch: ids of a shared feature fit into its smallest table."""
    generator = torch.Generator().manual_seed(seed)
    limits: dict[str, int] = {}
    for table in case["tables"]:
        for feature in table["features"]:
            limits[feature] = min(limits.get(feature, 1 << 30), table["rows"])
    rows = sum(case["rows"])
    lengths = {feature: torch.randint(0, case["most"] + 1, (rows,), generator=generator) for feature in limits}
    values = {f: torch.randint(0, limits[f], (int(n.sum()),), generator=generator) for f, n in lengths.items()}
    count = sum(value.numel() for value in values.values())
    weighted = any(table["weighted"] for table in case["tables"])
    return KeyedJaggedTensor(
        keys=list(limits),
        values=torch.cat([values[feature] for feature in limits]),
        lengths=torch.cat([lengths[feature] for feature in limits]),
        weights=torch.rand(count, generator=generator) * 2 - 0.5 if weighted else None,
    )


def backward(tables, ids: KeyedJaggedTensor, scale: float) -> None:
    """A loss whose gradients depend on the vectors; every output feature has another target."""
    loss = torch.zeros(())
    for number, (_, vectors) in enumerate(sorted(tables(ids).items())):
        loss = loss + (vectors - 0.1 * number).square().sum().to(loss.dtype)
    (loss * scale).backward()


def check(case: dict, exchanges: dict, rank: int, world_size: int) -> None:
    specs = [TableSpec(**{**table, "features": tuple(table["features"])}) for table in case["tables"]]
    copies = min(case["copies"], world_size)
    group, exchange = exchanges[copies]
    replicas = Replicas(exchange=exchange, fully_sharded=case["sliced"]) if copies > 1 else None
    sharding, ranks = {}, world_size // copies
    for spec, kind in zip(specs, case["sharding"], strict=False):
        try:
            check_sharding([spec], {spec.name: kind}, ranks=ranks, host=ranks if copies == 1 else 0)
            sharding[spec.name] = kind
        except ValueError:
            sharding[spec.name] = "table_wise"
    parts = parts_of(sharding)
    tables = build_tables(specs, optimizer=OPTIMIZER, seed=1, process_group=group, sharding=sharding, replicas=replicas)
    oracles = [
        ReferenceTables(specs, optimizer=OPTIMIZER, seed=1, dtype=d, alone=True, column_parts=parts)
        for d in (torch.float64, torch.float32)
    ]
    # the drawn rows of eight ranks, dealt to as many as there are
    dealt = [sum(case["rows"][r::world_size]) for r in range(world_size)]
    bounds = [sum(dealt[:r]) for r in range(world_size + 1)]
    total = max(1, sum(dealt))
    for step in range(4):
        whole = draw(case, step)
        backward(tables, part_of(whole, bounds[rank], bounds[rank + 1]), world_size / total)
        for oracle in oracles:
            backward(oracle, whole, 1 / total)
    found, exact, plain = tables.table_state(), oracles[0].table_state(), oracles[1].table_state()
    for name in exact:
        for key in ("weight", "momentum"):
            error = float((found[name][key].double() - exact[name][key]).abs().max())
            rounding = float((plain[name][key].double() - exact[name][key]).abs().max())
            allowed = 3 * rounding + 4 * torch.finfo(torch.float32).eps * float(exact[name][key].abs().max())
            assert error <= allowed, f"{name} {key}: error {error:.3g} against float64, allowed {allowed:.3g}"


def main(rank: int, world_size: int, init_method: str, file: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)  # what torchrun would say
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    exchanges = make_exchanges(world_size)
    for number, case in enumerate(json.loads(Path(file).read_text())):
        try:
            check(case, exchanges, rank, world_size)
        except Exception as problem:
            raise AssertionError(f"case {number}: {case}") from problem
    dist.destroy_process_group()
