"""What parallel.py runs: schemas, drawn batches, models and factorizations. Nothing is read from disk.

Batches are drawn whole from a seed, with the same rows on every rank and at every world size; a rank takes its part.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from gem_data.interface import Batch, EventStream, IdFeature, LabelInfo, Schema, StreamInfo, TableInfo
from gem_pipelines.config import OptimizerConfig, ParallelConfig, RunConfig, TablesConfig, TrainConfig
from gem_pipelines.model import presets
from gem_pipelines.model.config import HeadsConfig, InteractionConfig, ModelConfig, StreamConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

NOW = 1_000_000
PARITY_STEPS = 20
PARITY_ROWS = 61  # odd, so that ranks have unequal rows
ONE_ROW_STEP = 11  # this batch has one row: all ranks but one have none
DHEN = InteractionConfig(
    kind="dhen", fm_tokens=2, linear_tokens=2, rank=4, hidden=(16,), members=("fm", "linear", "dcn", "mlp"), dcn_rank=4
)
EXPERTS = InteractionConfig(kind="experts", fm_tokens=4, linear_tokens=4, rank=4, hidden=(16,), experts=4)

# Cut columns keep a moment a part, so tables cut so ("columns") have one process with the same parts as their oracle. A
# moment of few columns is noisier: at the rate of the others, start values that are 1e-7 apart are 1e-4 apart after 20
# steps of one process; at a fifth of it they are not (see COLUMNS_RATE).
COLUMNS_RATE = 0.004
CUT_COLUMNS = ("item=column_wise", "user=column_wise", "tag=grid")
KINDS = ("item=row_wise", "user=data_parallel", "tag=table_row_wise")

# name -> (parallel section and, as "sharding", tables.sharding; model). Every axis alone, then mixtures.
TWO: dict[str, tuple[dict[str, Any], str]] = {
    "replicate2.table2": ({"replicate": 2, "table_shard": 2}, "dhen"),
    "shard2.table2": ({"shard": 2}, "dhen"),
    "shard2.kept": ({"shard": 2, "reshard": False}, "dhen"),
    "expert2.table2": ({"expert": 2}, "dhen"),
    "expert2.parts": ({"expert": 2}, "experts"),
    "replicate2.table1x2": ({"table_replica": 2}, "dhen"),
    "shard2.sliced1x2": ({"shard": 2, "table_replica": 2, "fully_sharded": True}, "dhen"),
    "replicate2.kinds": ({"sharding": KINDS}, "dhen"),
    "shard2.columns": ({"shard": 2}, "columns"),
}
FOUR: dict[str, tuple[dict[str, Any], str]] = {
    "shard4.table4": ({"shard": 4}, "dhen"),
    "shard2.expert2.table4": ({"shard": 2, "expert": 2}, "dhen"),
    "shard2.replicate2.table2x2": ({"shard": 2, "table_replica": 2}, "dhen"),
    "expert2.replicate2.sliced2x2": ({"expert": 2, "table_replica": 2, "fully_sharded": True}, "dhen"),
    "shard2.expert2.sliced2x2": ({"shard": 2, "expert": 2, "table_replica": 2, "fully_sharded": True}, "dhen"),
    "expert4.table1x4": ({"expert": 4, "table_replica": 4}, "experts"),
    "shard2.expert2.kinds": ({"shard": 2, "expert": 2, "sharding": KINDS}, "dhen"),
    "shard4.columns": ({"shard": 4}, "columns"),
}
ONE: dict[str, tuple[dict[str, Any], str]] = {
    "one": ({}, "dhen"),
    "one.parts": ({}, "experts"),
    "one.columns": ({}, "columns"),
}
PARITY = {1: ONE, 2: TWO, 4: FOUR}
SPEED: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {
        "replicate2.table2": {"replicate": 2},
        "shard2.table2": {"shard": 2},
        "expert2.table2": {"expert": 2},
        "shard2.sliced1x2": {"shard": 2, "table_replica": 2, "fully_sharded": True},
    },
    4: {
        "replicate4.table4": {"replicate": 4},
        "shard4.table4": {"shard": 4},
        "shard2.expert2.table4": {"shard": 2, "expert": 2},
        "shard2.replicate2.table2x2": {"shard": 2, "table_replica": 2},
    },
}
# What is switched on.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "fused": {"overlap": True, "fused": True},
    "graphs32": {"overlap": True, "graphs": ("summaries", "interaction", "heads")},
    "bf16": {"overlap": True, "compute": "bfloat16"},
    "graphs": {
        "overlap": True,
        "compute": "bfloat16",
        "graphs": ("summaries", "interaction", "heads"),
    },
    "compiled": {
        "overlap": True,
        "compute": "bfloat16",
        "compile": ("features", "interaction", "heads"),
    },
}
EVERYWHERE = ("overlap", "bf16")  # the others at one rank and for the first factorization only


def speed_runs(world: int, variants: list[str]) -> list[tuple[str, str]]:
    """(factorization, variant) in the order in which they are run."""
    names = list(SPEED[world])
    return [(name, v) for v in variants for name in (names if v in EVERYWHERE else names[:1])]


@dataclass(frozen=True, kw_only=True)
class Size:
    """A recipe's size. rows: of a rank's batch; table_rows: of the largest table; steps: timed."""

    rows: int
    table_rows: int
    table_dim: int
    dim: int
    layers: int
    events: int
    steps: int


MID = Size(rows=2048, table_rows=2_000_000, table_dim=64, dim=128, layers=3, events=64, steps=20)
SMALL = Size(rows=32, table_rows=500, table_dim=8, dim=8, layers=2, events=4, steps=3)
SIZES = {"mid": MID, "small": SMALL}


def parity_schema() -> Schema:
    """Two weighted tasks, two streams, tables shared between scalars, lists and events, one pooled table."""
    return _schema(item=211, user=97, tag=31, categories=(13,), max_length=12)


def speed_schema(size: Size) -> Schema:
    rows = size.table_rows
    return _schema(item=rows, user=rows // 2, tag=rows // 4, categories=(rows // 20,) * 6, max_length=2 * size.events)


def _schema(*, item: int, user: int, tag: int, categories: tuple[int, ...], max_length: int) -> Schema:
    names = [f"category{number}" for number in range(len(categories))]
    tables = [("item", item), ("user", user), ("tag", tag), *zip(names, categories, strict=True)]
    return Schema(
        name="drawn",
        created_by="benchmarks/gpu/parallel.py",
        tables=tuple(TableInfo(name=name, rows=rows) for name, rows in tables),
        labels=(LabelInfo(name="click", weighted=True), LabelInfo(name="buy", weighted=True)),
        scalars=tuple(IdFeature(name=name, table=name) for name in ("item", "user", *names)),
        lists=(IdFeature(name="tags", table="tag"), IdFeature(name="bought", table="item")),
        dense=("price", "age", "hour"),
        streams=tuple(
            StreamInfo(
                name=name,
                fields=(IdFeature(name="item", table="item"), IdFeature(name="category", table=names[0])),
                action_bits=2,
                max_length=max_length,
            )
            for name in ("clicks", "views")
        ),
    )


def parity_config(parallel: dict[str, Any], model: str) -> RunConfig:
    """The debug model with experts, row-wise AdaGrad and AdamW."""
    interaction = {"dhen": DHEN, "experts": EXPERTS, "columns": DHEN}[model]
    parallel = dict(parallel)
    sharding = parallel.pop("sharding", CUT_COLUMNS if model == "columns" else ())
    return RunConfig(
        name="parity",
        model=dataclasses.replace(presets.debug(), interaction=interaction),
        tables=TablesConfig(lr=COLUMNS_RATE if model == "columns" else 0.02, sharding=sharding),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=5),
        train=TrainConfig(steps=PARITY_STEPS),
        parallel=ParallelConfig(**parallel),
    )


def speed_config(size: Size, parallel: dict[str, Any], *, attention: str, variant: str = "overlap") -> RunConfig:
    dim, on = size.dim, VARIANTS[variant]
    model = ModelConfig(
        table_dim=size.table_dim,
        dim=dim,
        layers=size.layers,
        stream=StreamConfig(dim=dim, heads=4 if dim >= 64 else 2, blocks=("hstu",) * size.layers),
        interaction=InteractionConfig(
            kind="dhen",
            members=("fm", "linear", "dcn", "mlp"),
            fm_tokens=16,
            linear_tokens=16,
            rank=16,
            hidden=(8 * dim,),
        ),
        heads=HeadsConfig(shared=(4 * dim,), hidden=(dim,)),
        attention=attention,  # type: ignore[arg-type]
        hstu=attention if on.get("fused") else "layers",  # type: ignore[arg-type]
        compute=on.get("compute", "float32"),
        compile=on.get("compile", ()),
        graphs=on.get("graphs", ()),
    )
    reshard = on.get("compute") != "bfloat16"  # at its best: there is memory to keep what was gathered
    return RunConfig(
        name="mid",
        model=model,
        optimizer=OptimizerConfig(lr=1e-3),
        train=TrainConfig(steps=1000),
        parallel=ParallelConfig(overlap=on.get("overlap", False), reshard=reshard, **parallel),
    )


def draw_batch(schema: Schema, rows: int, *, mean: int, seed: int, part: tuple[int, int] = (0, 1)) -> Batch:
    """Rows `part[0]` of `part[1]` equal ranges of a drawn global batch of `rows` rows.

    mean  events a row: lengths are drawn evenly from 0 to twice that, at most the stream's longest
    """
    generator = torch.Generator().manual_seed(seed)
    first, stop = (rows * number // part[1] for number in (part[0], part[0] + 1))

    def integers(high: int, count: int) -> torch.Tensor:
        return torch.randint(0, high, (count,), generator=generator)

    def cut(lengths: torch.Tensor) -> slice:
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).tolist()
        return slice(ends[first], ends[stop])

    table_rows = schema.table_rows()
    lengths = {feature.name: torch.ones(rows, dtype=torch.int64) for feature in schema.scalars}
    lengths |= {feature.name: integers(4, rows) for feature in schema.lists}
    events = {stream.name: integers(min(2 * mean, stream.max_length) + 1, rows) for stream in schema.streams}
    lengths |= {f"{s.name}.{field.name}": events[s.name] for s in schema.streams for field in s.fields}
    values = {key: integers(table_rows[table], int(lengths[key].sum())) for key, table in schema.id_features()}
    streams = {}
    for stream in schema.streams:
        own, count = events[stream.name][first:stop], int(events[stream.name].sum())
        actions, ages = integers(4, count), integers(5000, count)
        within = cut(events[stream.name])
        streams[stream.name] = EventStream(
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), own.cumsum(0)]),
            actions=actions[within],
            times=NOW - 1 - ages[within],
        )
    mine = slice(first, stop)
    labels = integers(2, rows * len(schema.labels)).view(rows, -1).float()
    weights = integers(3, rows * len(schema.labels)).view(rows, -1) / 2
    dense = torch.rand(rows, len(schema.dense), generator=generator)
    ids = torch.arange(first, stop)
    return Batch(
        sample_ids=ids,
        user_ids=ids,
        timestamps=torch.full((stop - first,), NOW),
        labels=labels[mine],
        weights=weights[mine],
        dense=dense[mine],
        ids=KeyedJaggedTensor(
            keys=list(lengths),
            values=torch.cat([values[key][cut(lengths[key])] for key in lengths]),
            lengths=torch.cat([found[mine] for found in lengths.values()]),
        ),
        streams=streams,
        row_index=torch.zeros(stop - first, 3, dtype=torch.int64),
        global_rows=rows,
        step=0,
    )


def parity_batches(rank: int, world: int) -> list[Batch]:
    """This rank's part of PARITY_STEPS global batches."""
    schema = parity_schema()
    return [
        draw_batch(schema, 1 if step == ONE_ROW_STEP else PARITY_ROWS, mean=5, seed=step, part=(rank, world))
        for step in range(PARITY_STEPS)
    ]
