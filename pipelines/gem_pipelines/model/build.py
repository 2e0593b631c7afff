"""What a job calls: the tables a model needs, and the model."""

from __future__ import annotations

import torch
from gem_data.interface import Schema
from gem_embeddings.interface import TableSpec

from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.gem import GemModel
from gem_pipelines.model.plan import plan_model


def table_specs(schema: Schema, config: ModelConfig) -> tuple[TableSpec, ...]:
    """One spec per table that a feature uses, in schema order.

    A table that only list features use is pooled (mean) inside the lookup. One that scalars or events use too gives
    single vectors, and `features.to_model_input` pools its lists.
    """
    features: dict[str, list[str]] = {}
    for key, table in schema.id_features():
        features.setdefault(table, []).append(key)
    lists = {feature.name for feature in schema.lists}
    rows = schema.table_rows()
    return tuple(
        TableSpec(
            name=table.name,
            rows=rows[table.name],
            dim=config.table_dim,
            features=tuple(features[table.name]),
            pooling="mean" if lists.issuperset(features[table.name]) else "none",
            init_std=config.table_init_std,
        )
        for table in schema.tables
        if table.name in features
    )


def build_model(schema: Schema, config: ModelConfig, *, seed: int) -> GemModel:
    """The dense model in float32 on CPU: same schema, config and seed, same parameters; no other generator moves."""
    plan = plan_model(schema, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GemModel(plan, config).float()
