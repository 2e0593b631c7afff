"""What travels in one step: every collective by axis, its bytes, and whether computing can hide it.

Dense, per FSDP unit, over shard x expert (n ranks; experts of a rank over shard alone):
    all_gather      the shard, before forward and again before backward (the root once)
    reduce_scatter  the whole gradient, after backward
    all_reduce      the gradient's shard over replicate
Summed experts, over expert: all_gather of the layer's input and of the output's gradient, reduce_scatter of the output
and of the input's gradient. Experts on parts of the tokens: four all_to_alls in their places. They sit between two
computations and hide behind nothing.
Tables, over table_shard: all_to_all of ids (for the next batch: hidden), of vectors and of their gradients (exposed).
Over table_replica, table_sync "average": plain copies, all_reduce of weights and momentum every `sync_every` steps
(exposed); fully sharded, all_gather of weights and momentum before the lookup (and once more before the update when the
copy is released in between) and reduce_scatter after it (hidden behind the dense part). table_sync "gradients": plain
copies, all_gather of touched rows and their gradients (exposed), taking ids as spread evenly, which is the most that
can be touched; fully sharded, one all_gather and one reduce_scatter of weights.

Dense and expert bytes are those of each rank, exact for the rank named. Those of tables are means over the ranks, since
which rank owns which table decides them; tables are taken as whole, or cut by rows without pooling (pooled tables cut
by rows move table_shard times as many vectors). Bytes are what is sent, as gem_comm counts (traffic.py), so they equal
counted bytes wherever a run is counted. Left out: loss, metrics, gradient norm and exchanged counts, some hundred bytes
a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gem_comm.interface import Kind, MeshSpec
from gem_comm.traffic import sent_bytes

from gem_pipelines.planner.workload import TableLoad, Unit, Workload, owned_experts, padded_shard

TableSync = Literal["gradients", "average"]
ID_BYTES = 8
LENGTH_BYTES = 8
MOMENTUM_BYTES = 4
TABLE_NUMBER_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Move:
    """Equal collectives of one step. sent: bytes that this rank sends, all calls together. hidden: dense computing runs
    beside it. balanced: False where the fullest rank's part decides (tables)."""

    what: str
    axis: str
    kind: Kind
    calls: float
    sent: float
    hidden: bool
    balanced: bool = True


def moves_of(
    workload: Workload,
    spec: MeshSpec,
    *,
    expert_rank: int = 0,
    table_sync: TableSync = "average",
    sync_every: int = 1,
    table_gathers: int = 2,
) -> tuple[Move, ...]:
    """All moves of one step that move something. expert_rank: coordinate on the expert axis of the rank looked at."""
    moves = [*_dense(workload, spec, expert_rank), *_experts(workload, spec, expert_rank), *_tables(workload, spec)]
    if table_sync == "gradients":
        moves += _summed_copies(workload, spec)
    else:
        moves += _copies(workload, spec, sync_every, table_gathers)
    return tuple(move for move in moves if move.sent > 0)


def bytes_by_axis(moves: tuple[Move, ...]) -> dict[str, float]:
    """Bytes that a rank sends over each axis in a step."""
    totals: dict[str, float] = {}
    for move in moves:
        totals[move.axis] = totals.get(move.axis, 0.0) + move.sent
    return totals


def _move(what: str, axis: str, kind: Kind, *, size: int, x_bytes: float, calls: int, hidden: bool) -> Move:
    sent = calls * sent_bytes(kind, size=size, x_bytes=int(x_bytes))
    return Move(what=what, axis=axis, kind=kind, calls=calls, sent=sent, hidden=hidden)


def _dense(workload: Workload, spec: MeshSpec, expert_rank: int) -> Iterator[Move]:
    for unit in workload.units:
        yield from _unit(workload, spec, unit, expert_rank)


def _unit(workload: Workload, spec: MeshSpec, unit: Unit, expert_rank: int) -> Iterator[Move]:
    shapes = list(unit.shapes)
    own: list[tuple[str, list[tuple[int, ...]], str, int]] = []
    if unit.experts is not None:
        if spec.expert == 1:
            shapes += [shape for expert in unit.experts.shapes for shape in expert]
        else:
            for number in owned_experts(len(unit.experts.shapes), spec.expert, expert_rank):
                own.append((f"expert {number} of", list(unit.experts.shapes[number]), "shard", spec.shard))
    for label, parts, axis, ranks in [("", shapes, "shard_expert", spec.shard * spec.expert), *own]:
        elements = padded_shard(parts, ranks)
        each = workload.root_gather_bytes if unit.root else None
        gathered, reduced = elements * (each or workload.gather_bytes), elements * workload.reduce_bytes
        what = f"{label} {unit.name}".strip()
        gathers = 1 if unit.root else 2
        yield _move(
            f"parameters of {what}", axis, "all_gather", size=ranks, x_bytes=gathered, calls=gathers, hidden=True
        )
        yield _move(
            f"gradients of {what}", axis, "reduce_scatter", size=ranks, x_bytes=reduced * ranks, calls=1, hidden=True
        )
        yield _move(
            f"gradients of {what}",
            "replicate",
            "all_reduce",
            size=spec.replicate,
            x_bytes=reduced,
            calls=1,
            hidden=True,
        )


def _expert_parts(workload: Workload, spec: MeshSpec, unit: Unit, expert_rank: int) -> Iterator[Move]:
    """Each rank sends the tokens that others' experts read, and others' rows of what its own experts made."""
    experts, n = unit.experts, spec.expert
    assert experts is not None
    own = sum(experts.parts[i] for i in owned_experts(len(experts.parts), n, expert_rank))
    made = experts.out_elements // n
    each = workload.batch * workload.activation_number_bytes
    what = f"experts of {unit.name}"
    for name, numbers in (
        (f"input of {what}", experts.in_elements - own),
        (f"output of {what}", (n - 1) * made),
        (f"output gradient of {what}", experts.out_elements - made),
        (f"input gradient of {what}", (n - 1) * own),
    ):
        yield Move(what=name, axis="expert", kind="all_to_all", calls=1, sent=each * numbers, hidden=False)


def _experts(workload: Workload, spec: MeshSpec, expert_rank: int) -> Iterator[Move]:
    n, number = spec.expert, workload.activation_number_bytes
    for unit in workload.units:
        if unit.experts is None or n == 1:
            continue
        if unit.experts.parts:
            yield from _expert_parts(workload, spec, unit, expert_rank)
            continue
        read = workload.batch * unit.experts.in_elements * number
        made = workload.batch * unit.experts.out_elements * number
        what = f"experts of {unit.name}"
        for name, kind, x_bytes in (
            (f"input of {what}", "all_gather", read),
            (f"output of {what}", "reduce_scatter", made * n),
            (f"output gradient of {what}", "all_gather", made),
            (f"input gradient of {what}", "reduce_scatter", read * n),
        ):
            yield _move(name, "expert", kind, size=n, x_bytes=x_bytes, calls=1, hidden=False)  # type: ignore[arg-type]


def _tables(workload: Workload, spec: MeshSpec) -> Iterator[Move]:
    n = spec.table_shard
    away = workload.batch * (n - 1) / n
    ids = sum(table.ids for table in workload.tables) * ID_BYTES
    lengths = sum(table.features for table in workload.tables) * LENGTH_BYTES
    vectors = sum(table.vectors * table.dim for table in workload.tables) * workload.vector_bytes
    for what, size, hidden in (
        ("ids", ids + lengths, True),
        ("embedding vectors", vectors, False),
        ("gradients of embedding vectors", vectors, False),
    ):
        yield Move(
            what=what, axis="table_shard", kind="all_to_all", calls=1, sent=away * size, hidden=hidden, balanced=False
        )


def _copies(workload: Workload, spec: MeshSpec, sync_every: int, table_gathers: int) -> list[Move]:
    n = spec.table_replica
    part = table_bytes(workload) / spec.table_shard
    if spec.fully_sharded:
        kinds: tuple[tuple[str, Kind, float, float, bool], ...] = (
            ("slices of tables", "all_gather", table_gathers, table_gathers * (n - 1) * part / n, True),
            ("updated tables", "reduce_scatter", 1, (n - 1) * part / n, True),
        )
    else:
        each = 1 / sync_every
        kinds = (("averages of tables", "all_reduce", each, each * 2 * (n - 1) * part / n, False),)
    return [
        Move(what=what, axis="table_replica", kind=kind, calls=calls, sent=sent, hidden=hidden, balanced=False)
        for what, kind, calls, sent, hidden in kinds
    ]


def touched_rows(workload: Workload, table: TableLoad, ranks: int) -> float:
    """Rows of a table that the lookups of `ranks` ranks are expected to touch, with ids drawn evenly: the most.

    Example: 100 lookups of 100 rows touch 63 of them; 100 lookups of a million rows, 100.
    """
    lookups = workload.batch * ranks * table.ids
    return table.rows * -math.expm1(lookups * math.log1p(-1.0 / table.rows)) if table.rows > 1 else min(1.0, lookups)


def _summed_copies(workload: Workload, spec: MeshSpec) -> list[Move]:
    """gem_embeddings' SummedCopies (touched rows, their numbers and gradients) and SlicedSums (weights, twice)."""
    n, shards = spec.table_replica, spec.table_shard
    if spec.fully_sharded:
        weights = sum(t.rows * t.dim * TABLE_NUMBER_BYTES for t in workload.tables) / shards
        kinds: tuple[tuple[str, Kind, float], ...] = (
            ("slices of tables", "all_gather", (n - 1) * weights / n),
            ("gradients of tables", "reduce_scatter", (n - 1) * weights / n),
        )
        calls = 1
    else:
        rows = [(touched_rows(workload, t, shards), t.dim) for t in workload.tables]
        sent = (n - 1) * sum(count * (dim * TABLE_NUMBER_BYTES + ID_BYTES) for count, dim in rows) / shards
        kinds, calls = (("touched rows and gradients", "all_gather", sent),), 3
    return [
        Move(
            what=what,
            axis="table_replica",
            kind=kind,
            calls=calls,
            sent=sent,
            hidden=spec.fully_sharded,
            balanced=False,
        )
        for what, kind, sent in kinds
    ]


def table_bytes(workload: Workload) -> float:
    """Weights and momentum of one copy of all tables."""
    return float(sum(t.rows * (t.dim * TABLE_NUMBER_BYTES + MOMENTUM_BYTES) for t in workload.tables))
