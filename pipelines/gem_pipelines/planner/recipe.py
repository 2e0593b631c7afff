"""The workload of a recipe: its model's shapes (shapes.py), and what a sample holds in the recipe's own data.

FLOPs are counted at the data's lengths; ids follow from the schema and the mean lengths.
"""

from __future__ import annotations

from typing import Any

from gem_data.api import inspect_dataset
from gem_data.remote import DataPath

from gem_pipelines.config import RunConfig
from gem_pipelines.data_source import trained_schema
from gem_pipelines.errors import ConfigError
from gem_pipelines.planner.shapes import PROBE_ROWS, shaped_workload
from gem_pipelines.planner.workload import Workload


def recipe_workload(config: RunConfig, data: DataPath, *, world_size: int) -> Workload:
    """Workload of one micro-batch of `config` on `world_size` ranks, from the data set in `data`."""
    schema = trained_schema(data, config.data)
    described = inspect_dataset(data)["splits"]["train"]
    if config.data.global_batch_size < world_size:
        raise ConfigError(
            f"data.global_batch_size is {config.data.global_batch_size}, fewer rows than {world_size} ranks; give more "
            "with --data.global_batch_size"
        )
    shown = described.get("impressions")
    return shaped_workload(
        schema,
        config.model,
        name=config.name,
        batch=config.data.global_batch_size // world_size,
        lengths={stream.name: _typical(described["streams"][stream.name]) for stream in schema.streams},
        stream_means={stream.name: float(described["streams"][stream.name]["mean"]) for stream in schema.streams},
        list_means={feature.name: float(described["lists"][feature.name]["mean"]) for feature in schema.lists},
        source=f"recipe {config.name} on its data",
        impressions=None if shown is None else max(1, round(float(shown["mean"]))),
    )


def _typical(described: dict[str, Any]) -> list[int]:
    """PROBE_ROWS lengths along the quantiles of a stream. Example: quantiles 0 at 0 and 10 at 1: 1, 2, 3, 4, 6, ..."""
    known = sorted((float(q), float(value)) for q, value in described["quantiles"].items())
    found = []
    for number in range(PROBE_ROWS):
        at = (number + 0.5) / PROBE_ROWS
        below = max((k for k in known if k[0] <= at), default=known[0])
        above = min((k for k in known if k[0] >= at), default=known[-1])
        share = 0.0 if above[0] == below[0] else (at - below[0]) / (above[0] - below[0])
        found.append(round(below[1] + share * (above[1] - below[1])))
    return found
