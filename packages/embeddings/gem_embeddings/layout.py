"""Which part of which table lies on which rank of a copy, for every kind of sharding.

    table_wise       whole on one rank, largest first to the least loaded
    row_wise         equal blocks of rows on all ranks
    column_wise      parts of equal width, each placed as a table of its own; "column_wise:4" says how many, else 2
    data_parallel    whole on every rank; gradients are summed (dense_tables.py)
    table_row_wise   equal blocks of rows on the ranks of one host
    grid             parts of equal width as in column_wise, each cut by rows over the ranks of one host

Placing needs no performance model and no collective, and is the same on every run and every rank.

**Cutting columns makes another optimizer.** FBGEMM keeps one moment per row *and part*: the mean of squares over the
part's own columns, where row-wise AdaGrad takes all columns of the row. TorchRec accepts that, and so do we, by name:
the number of parts belongs to the table ("column_wise:4"), not to the number of ranks, so that a table in 4 parts
trains alike on 1 and on 8 ranks (parts may share a rank). Its state keeps (rows, parts) moments; their mean over parts
is what row-wise AdaGrad would hold for the same gradients. All other kinds are row-wise AdaGrad exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gem_embeddings.interface import TableSpec
from gem_embeddings.validation import rows_suffice

SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "grid")
CUT_BY_COLUMNS = ("column_wise", "grid")
CUT_BY_ROWS = ("row_wise", "table_row_wise", "grid")
ON_A_HOST = ("table_row_wise", "grid")
WHOLE_JOB = (*ON_A_HOST, "data_parallel")
DEFAULT_PARTS = 2


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A block of a table, and the rank of the copy that holds it."""

    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a table lies. shards: all of them, in TorchRec's order (columns, then rows); none for data_parallel."""

    kind: str
    shards: tuple[Shard, ...]

    @property
    def parts(self) -> int:
        """How many parts its columns are cut into."""
        return max(1, len({shard.first_column for shard in self.shards}))

    def describe(self, ranks: int) -> str:
        """Example: "whole on rank 1", "rows over 4 ranks", "2 column parts on ranks 0, 1"."""
        own = sorted({shard.rank for shard in self.shards})
        listed = ", ".join(map(str, own))
        if self.kind == "data_parallel":
            return f"whole on each of {ranks} ranks"
        if self.kind == "table_wise":
            return f"whole on rank {own[0]}"
        if self.kind == "row_wise":
            return f"rows over {ranks} ranks"
        if self.kind == "column_wise":
            return f"{self.parts} column parts on ranks {listed}"
        if self.kind == "table_row_wise":
            return f"rows over ranks {listed} of one host"
        return f"{self.parts} column parts, rows over ranks {listed}"


def parse_sharding(text: str) -> tuple[str, int]:
    """(kind, column parts) of "row_wise" or "column_wise:4". ValueError says what is expected."""
    kind, colon, number = text.partition(":")
    if kind not in SHARDINGS or (colon and (kind not in CUT_BY_COLUMNS or not number.isdigit() or int(number) < 1)):
        raise ValueError(
            f"sharding must be one of {SHARDINGS}, with the number of column parts after column_wise or grid "
            f"('column_wise:4'), got {text!r}"
        )
    parts = int(number) if colon else DEFAULT_PARTS
    return kind, parts if kind in CUT_BY_COLUMNS else 1


def check_sharding(specs: Sequence[TableSpec], sharding: Mapping[str, str], *, ranks: int, host: int) -> None:
    """Raise ValueError listing tables that cannot be cut as asked.

    ranks, host: ranks of a copy, and how many of them share a host (a divisor of ranks); 0: a copy is not made of hosts

    Example: 5 rows over 4 ranks are cut in blocks of 2: 2, 2, 1 and none. FBGEMM on a CPU takes a kernel without rows
    for one on a GPU and fails in its first lookup, so that is refused.
    """
    problems = []
    for spec in specs:
        if spec.name not in sharding:
            continue
        kind, parts = parse_sharding(sharding[spec.name])
        if kind in CUT_BY_COLUMNS and spec.dim % (4 * parts):
            problems.append(
                f"table {spec.name!r}: {kind} in {parts} parts needs a dim that is a multiple of {4 * parts} (parts "
                f"of 4, 8, ... columns), got {spec.dim}"
            )
        if kind in ON_A_HOST and spec.pooling == "none":
            problems.append(
                f"table {spec.name!r}: TorchRec offers {kind} to pooled tables only, this one has pooling 'none'; use "
                "row_wise"
            )
        if kind in ON_A_HOST and not host:
            problems.append(
                f"table {spec.name!r}: {kind} cuts over the ranks of a host, which TorchRec counts over the whole "
                "job; a copy of the tables must then be the whole job (table_replica 1); use row_wise"
            )
        if kind == "data_parallel" and not host:
            problems.append(
                f"table {spec.name!r}: TorchRec sends the start of data_parallel tables from rank 0 of the job, so a "
                "copy of the tables must be the whole job (table_replica 1); use table_wise"
            )
        over = {"row_wise": ranks, "table_row_wise": host, "grid": host}.get(kind, 1) or 1
        if not rows_suffice(spec.rows, over):
            problems.append(
                f"table {spec.name!r}: {kind} cuts {spec.rows} rows over {over} ranks in blocks of "
                f"{-(-spec.rows // over)}, which leaves ranks without rows; use table_wise for a table this small"
            )
    if problems:
        raise ValueError("tables cannot be cut as asked:\n  " + "\n  ".join(problems))


def place(specs: Sequence[TableSpec], sharding: Mapping[str, str], *, ranks: int, host: int) -> dict[str, Layout]:
    """Table name -> layout; table_wise where `sharding` says nothing.

    Whole tables and column parts go to single ranks, largest first to the rank with the fewest numbers so far (the
    lowest on a tie), after the blocks that kinds with fixed places put there. Hosts are chosen alike.

    Example: tables of 9, 5, 4 and 1 rows of equal dim on two ranks go to ranks 0, 1, 1 and 0: loads 10 and 9.
    """
    loads = [0.0] * ranks
    layouts: dict[str, Layout] = {}
    for spec in specs:
        kind, parts = parse_sharding(sharding.get(spec.name, "table_wise"))
        if kind == "data_parallel":
            layouts[spec.name] = Layout(kind=kind, shards=())
        elif kind == "row_wise":
            layouts[spec.name] = Layout(kind=kind, shards=_by_rows(spec, range(ranks), 0, spec.dim))
        elif kind in ON_A_HOST:
            layouts[spec.name] = _on_hosts(spec, kind, parts, loads, host or ranks)
    singles = []
    for spec in specs:
        kind, parts = parse_sharding(sharding.get(spec.name, "table_wise"))
        if spec.name not in layouts:
            singles += [(-spec.rows * (spec.dim // parts), spec.name, part) for part in range(parts)]
    by_name, rank_of = {spec.name: spec for spec in specs}, {}
    for size, name, part in sorted(singles):
        rank_of[name, part] = rank = loads.index(min(loads))
        loads[rank] -= size
    for name, spec in by_name.items():
        if name not in layouts:
            kind, parts = parse_sharding(sharding.get(name, "table_wise"))
            width = spec.dim // parts
            layouts[name] = Layout(
                kind=kind,
                shards=tuple(
                    Shard(rank=rank_of[name, p], first_row=0, rows=spec.rows, first_column=p * width, columns=width)
                    for p in range(parts)
                ),
            )
    return {spec.name: layouts[spec.name] for spec in specs}


def _by_rows(spec: TableSpec, ranks: range, first_column: int, columns: int) -> tuple[Shard, ...]:
    """Blocks of ceil(rows / ranks) rows, as TorchRec's input exchange assumes."""
    block = -(-spec.rows // len(ranks))
    return tuple(
        Shard(
            rank=rank,
            first_row=n * block,
            rows=max(0, min(block, spec.rows - n * block)),
            first_column=first_column,
            columns=columns,
        )
        for n, rank in enumerate(ranks)
    )


def _on_hosts(spec: TableSpec, kind: str, parts: int, loads: list[float], host: int) -> Layout:
    width, shards = spec.dim // parts, ()  # type: tuple[int, tuple[Shard, ...]]
    hosts = [range(first, first + host) for first in range(0, len(loads), host)]
    for part in range(parts):
        chosen = min(hosts, key=lambda own: (sum(loads[rank] for rank in own), own.start))
        for rank in chosen:
            loads[rank] += spec.rows * width / host
        shards += _by_rows(spec, chosen, part * width, width)
    return Layout(kind=kind, shards=shards)
