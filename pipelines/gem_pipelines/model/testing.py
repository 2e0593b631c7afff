"""Input factories for tests of models: a small schema, one config per kind of module, and drawn embeddings.

Shipped, so that a model kept elsewhere can be held to the same tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from gem_data.interface import IdFeature, LabelInfo, Schema, StreamInfo, TableInfo

from gem_pipelines.model.config import HeadsConfig, InteractionConfig, ModelConfig, StreamConfig
from gem_pipelines.model.inputs import ModelInput, StreamInput
from gem_pipelines.model.plan import StreamPlan, plan_model

TABLE_DIM = 4
NOW = 1_000_000


def make_schema() -> Schema:
    """Two tasks, two streams, of which "clicks" shares tables with the scalar "item" and the list "tags"."""
    return Schema(
        name="tiny",
        created_by="tests",
        tables=(TableInfo(name="item", rows=11), TableInfo(name="user", rows=5), TableInfo(name="tag", rows=7)),
        labels=(LabelInfo(name="click"), LabelInfo(name="buy")),
        scalars=(IdFeature(name="item", table="item"), IdFeature(name="user", table="user")),
        lists=(IdFeature(name="tags", table="tag"),),
        dense=("price", "age"),
        streams=(
            StreamInfo(
                name="clicks",
                fields=(IdFeature(name="item", table="item"), IdFeature(name="tag", table="tag")),
                action_bits=3,
                max_length=12,
            ),
            StreamInfo(name="views", fields=(IdFeature(name="tag", table="tag"),), action_bits=0, max_length=8),
        ),
    )


def make_config(**changes: Any) -> ModelConfig:
    """Two layers, every width small; `stream` and the rest can be replaced."""
    config = ModelConfig(
        table_dim=TABLE_DIM,
        dim=6,
        layers=2,
        dense_tokens=1,
        stream=StreamConfig(dim=8, heads=2, blocks=("hstu", "hstu"), seeds=3, weight_tokens=3),
        interaction=InteractionConfig(fm_tokens=2, linear_tokens=2, rank=3, hidden=(5,)),
        heads=HeadsConfig(shared=(7,), hidden=(5,)),
    )
    return dataclasses.replace(config, **changes)


def stream_config(**changes: Any) -> StreamConfig:
    """The stream config of `make_config()` with changes."""
    return dataclasses.replace(make_config().stream, **changes)


# One config per kind of block, summary, interaction and head: what "all kinds" means in these tests.
KINDS = {
    "hstu": make_config(),
    "hstu_cls_window": make_config(stream=stream_config(cls_tokens=2, window=3)),
    "target_read": make_config(stream=stream_config(target_read=True), dense_hidden=(5, 4)),
    "kunlun": make_config(
        stream=stream_config(blocks=("pffn", "window"), summary="hsp", window=2),
        interaction=InteractionConfig(kind="experts", fm_tokens=2, linear_tokens=2, rank=3, hidden=(5,)),
        norm="rms",
    ),
    "interformer": make_config(
        stream=stream_config(blocks=("interformer", "interformer"), cls_tokens=1),
        interaction=InteractionConfig(
            kind="dhen", members=("fm", "linear", "dcn", "mlp", "attention"), fm_tokens=2, linear_tokens=2, rank=3
        ),
        heads=HeadsConfig(kind="mmoe", shared=(7,), hidden=(5,), experts=3),
        bias=True,
        norm_affine=True,
    ),
    "mixed": make_config(
        layers=3,
        stream=stream_config(blocks=("hstu",), rotary=False),
        streams={"clicks": stream_config(dim=12, heads=3, blocks=("pffn", "window", "hstu"), window=4, skip=False)},
        heads=HeadsConfig(kind="separate", hidden=(5,)),
    ),
}


def make_inputs(
    clicks: list[int],
    views: list[int] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    table_dim: int = TABLE_DIM,
) -> ModelInput:
    """Inputs of rows with these numbers of events; rows with equal position and seed in equal batches are equal."""
    views = [1] * len(clicks) if views is None else views
    counts = list(zip(clicks, views, strict=True))
    rows = [_row(*events, seed * 1000 + index, table_dim) for index, events in enumerate(counts)]
    empty = {name: tensor[:0] for name, tensor in _row(1, 1, 0, table_dim).items()}
    return _join(rows, empty, dtype)


def _row(clicks: int, views: int, seed: int, table_dim: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def times(count: int) -> torch.Tensor:
        return NOW - 1 - torch.randint(0, 5000, (count,), generator=generator).sort(descending=True)[0]

    return {
        "item": draw(1, table_dim),
        "user": draw(1, table_dim),
        "tags": draw(1, table_dim),
        "clicks.item": draw(clicks, table_dim),
        "clicks.tag": draw(clicks, table_dim),
        "views.tag": draw(views, table_dim),
        "dense": draw(1, 2),
        "clicks.actions": torch.randint(0, 8, (clicks,), generator=generator),
        "clicks.times": times(clicks),
        "views.actions": torch.zeros(views, dtype=torch.int64),
        "views.times": times(views),
    }


def _join(rows: list[dict[str, torch.Tensor]], empty: dict[str, torch.Tensor], dtype: torch.dtype) -> ModelInput:
    whole = {name: torch.cat([row[name] for row in rows] or [empty[name]]) for name in empty}
    streams = {}
    for name in ("clicks", "views"):
        counts = torch.tensor([row[f"{name}.times"].shape[0] for row in rows], dtype=torch.int64)
        streams[name] = StreamInput(
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
            actions=whole[f"{name}.actions"],
            times=whole[f"{name}.times"],
            max_len=int(counts.max()) if rows else 0,
        )
    keys = ("item", "user", "tags", "clicks.item", "clicks.tag", "views.tag")
    return ModelInput(
        embeddings={key: whole[key].to(dtype).requires_grad_() for key in keys},
        dense=whole["dense"].to(dtype),
        timestamps=torch.full((len(rows),), NOW),
        streams=streams,
    )


def clicks_plan(config: ModelConfig) -> StreamPlan:
    """The plan of stream "clicks" under a config."""
    return plan_model(make_schema(), config).streams[0]
