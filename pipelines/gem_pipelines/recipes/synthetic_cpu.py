"""Recipe `synthetic_cpu`: generated ads data with a planted click probability: the best possible NE is known."""

from __future__ import annotations

from gem_pipelines.config import DataConfig, OptimizerConfig, RunConfig, TablesConfig, TrainConfig
from gem_pipelines.model import presets


def synthetic_cpu() -> RunConfig:
    """120,000 impressions with three streams and a delayed second label."""
    return RunConfig(
        name="synthetic_cpu",
        data=DataConfig(source="synthetic", global_batch_size=512),
        tables=TablesConfig(lr=0.02),
        model=presets.synthetic_cpu(),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=50),
        train=TrainConfig(epochs=1, checkpoint_every=100, print_every=20),
    )
