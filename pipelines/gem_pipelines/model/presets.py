"""Model sizes for the recipes."""

from __future__ import annotations

from gem_pipelines.model.config import HeadsConfig, InteractionConfig, ModelConfig, StreamConfig


def debug() -> ModelConfig:
    """As small as it can be with every arch present: for tests and first tries."""
    return ModelConfig(
        table_dim=8,
        dim=8,
        layers=2,
        stream=StreamConfig(dim=8, heads=2, blocks=("hstu", "hstu"), seeds=2, recent_tokens=1),
        interaction=InteractionConfig(fm_tokens=2, linear_tokens=2, rank=4, hidden=(16,)),
        heads=HeadsConfig(shared=(16,), hidden=(8,)),
    )


def ml100k_cpu() -> ModelConfig:
    """For MovieLens-100K on two CPU cores: Kunlun layers, which here beat two HSTU blocks and cost less."""
    return ModelConfig(
        table_dim=32,
        dim=32,
        layers=2,
        stream=StreamConfig(
            dim=32,
            heads=2,
            blocks=("pffn", "window"),
            summary="hsp",
            window=16,
            seeds=8,
            summary_tokens=2,
            weight_tokens=4,
        ),
        interaction=InteractionConfig(fm_tokens=4, linear_tokens=4, rank=8, hidden=(64,)),
        heads=HeadsConfig(shared=(64,), hidden=(32,)),
    )


def synthetic_cpu() -> ModelConfig:
    """For the generated data on two CPU cores: HSTU blocks, three streams, two tasks. How much of the past matches
    the candidate is planted there, so the candidate reads every stream by itself.
    """
    return ModelConfig(
        table_dim=32,
        table_init_std=0.1,
        dim=32,
        layers=2,
        dense_hidden=(32,),
        stream=StreamConfig(dim=32, heads=2, blocks=("hstu", "hstu"), target_read=True),
        interaction=InteractionConfig(fm_tokens=4, linear_tokens=4, rank=8, hidden=(64,)),
        heads=HeadsConfig(shared=(64,), hidden=(32,)),
    )
