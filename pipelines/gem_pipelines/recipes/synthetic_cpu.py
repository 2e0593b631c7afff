"""Recipe `synthetic_cpu`: 200,000 generated impressions with a planted click probability, so the best NE is known."""

from __future__ import annotations

from gem_pipelines.config import DataConfig, OptimizerConfig, RunConfig, TablesConfig, TrainConfig
from gem_pipelines.model import presets


def synthetic_cpu() -> RunConfig:
    """Needs no network."""
    return RunConfig(
        name="synthetic_cpu",
        data=DataConfig(source="synthetic", global_batch_size=256),
        tables=TablesConfig(lr=0.01),
        model=presets.synthetic_cpu(),
        optimizer=OptimizerConfig(lr=5e-3, warmup_steps=50),
        train=TrainConfig(epochs=1, checkpoint_every=200),
    )
