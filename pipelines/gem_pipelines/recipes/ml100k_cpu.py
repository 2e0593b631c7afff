"""Recipe `ml100k_cpu`: MovieLens-100K, label rating >= 4, later 20 % of the events as evaluation; minutes on two CPU
cores.
"""

from __future__ import annotations

from gem_pipelines.config import DataConfig, OptimizerConfig, RunConfig, TablesConfig, TrainConfig
from gem_pipelines.model import presets


def ml100k_cpu() -> RunConfig:
    """The default run of the README."""
    return RunConfig(
        name="ml100k_cpu",
        data=DataConfig(source="ml-100k", global_batch_size=512, max_length=50),
        tables=TablesConfig(lr=0.02),
        model=presets.ml100k_cpu(),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=50),
        train=TrainConfig(epochs=1, checkpoint_every=100),
    )
