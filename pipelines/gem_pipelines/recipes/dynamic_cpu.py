"""Recipe `dynamic_cpu`: the generated data of `synthetic_cpu`, where item ids earn their rows (zero-collision hashing).

Tables of 1,001 items hold 600 ids each, and one row for all others; what is kept is decided every 50 steps, by the
three eviction policies of TorchRec. `ids_seen`, `ids_outside`, `ids_inserted` and `ids_evicted` in metrics.jsonl count
by feature.
"""

from __future__ import annotations

from gem_pipelines.config import DataConfig, OptimizerConfig, RunConfig, TablesConfig, TrainConfig
from gem_pipelines.model import presets


def dynamic_cpu() -> RunConfig:
    """Needs no network."""
    return RunConfig(
        name="dynamic_cpu",
        data=DataConfig(source="synthetic", global_batch_size=256),
        tables=TablesConfig(
            lr=0.01,
            policies=("item=zch", "ads.item=zch", "organic.item=zch", "search.item=zch"),
            zch=("item=distance_lfu:50:601", "organic_item=lfu:50:601", "search_item=lru:50:601"),
        ),
        model=presets.synthetic_cpu(),
        optimizer=OptimizerConfig(lr=5e-3, warmup_steps=50),
        train=TrainConfig(epochs=1, checkpoint_every=200),
    )
