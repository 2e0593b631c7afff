"""Recipe `debug`: seconds on any machine; for tests and for a first look. Its figures say nothing about quality."""

from __future__ import annotations

from gem_pipelines.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from gem_pipelines.model import presets


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
        model=presets.debug(),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=5),
        train=TrainConfig(
            steps=20,
            metric_window=10,
            checkpoint_every=10,
            eval_batch_size=256,
            profile_every=10,
            threads=1,
            report=False,
        ),
    )
