"""Recipe `debug`: seconds on any machine; for tests and for a first look. Its figures say nothing about quality."""

from __future__ import annotations

from gem_pipelines.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from gem_pipelines.model.config import HeadsConfig, InteractionConfig, ModelConfig, StreamConfig


def debug() -> RunConfig:
    """20 steps on 2,000 generated rows."""
    return RunConfig(
        name="debug",
        data=DataConfig(
            source="synthetic",
            options=("rows=2000", "users=100", "items=200", "streams=2", "max_length=12"),
            global_batch_size=64,
            logical_shards=2,
        ),
        model=ModelConfig(
            table_dim=8,
            dim=8,
            layers=2,
            stream=StreamConfig(dim=8, heads=2, blocks=("hstu", "pffn"), seeds=2, recent_tokens=1, weight_tokens=2),
            interaction=InteractionConfig(fm_tokens=2, linear_tokens=2, rank=4, hidden=(16,)),
            heads=HeadsConfig(shared=(16,), hidden=(8,)),
        ),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=5),
        train=TrainConfig(
            steps=20, metric_window=10, checkpoint_every=10, eval_batch_size=256, profile_every=10, threads=1
        ),
    )
