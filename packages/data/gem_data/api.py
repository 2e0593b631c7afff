"""What users call: write, read, check and load data sets, and make single batches. See README.md for an example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gem_data.balance import budget_batches, imbalance, partition
from gem_data.collate import collate
from gem_data.cost import (
    FitError,
    Observation,
    batch_cost,
    cost_from_dict,
    cost_to_dict,
    events_cost,
    fit_cost,
    row_costs,
)
from gem_data.inspection import inspect_dataset
from gem_data.interface import DataError, Loader, LoaderConfig
from gem_data.loader import ArrowLoader, warn_of_small_windows
from gem_data.reference import ReferenceLoader
from gem_data.remote import RemotePath, data_path, local_only
from gem_data.request_tables import expand_requests, group_requests, request_schema, to_impressions, to_requests
from gem_data.requests import expand_batch, expanded_schema
from gem_data.schema import read_schema, schema_from_dict, schema_to_dict, select
from gem_data.single import batch_from_dicts, batch_from_table
from gem_data.verify import Report, verify_dataset
from gem_data.writing import write_dataset

__all__ = [
    "FitError",
    "Observation",
    "Report",
    "batch_cost",
    "batch_from_dicts",
    "batch_from_table",
    "budget_batches",
    "build_loader",
    "collate",
    "cost_from_dict",
    "cost_to_dict",
    "data_path",
    "events_cost",
    "expand_batch",
    "expand_requests",
    "expanded_schema",
    "fit_cost",
    "group_requests",
    "imbalance",
    "inspect_dataset",
    "partition",
    "read_schema",
    "request_schema",
    "row_costs",
    "schema_from_dict",
    "schema_to_dict",
    "select",
    "to_impressions",
    "to_requests",
    "verify_dataset",
    "write_dataset",
]

_LOADERS: dict[str, Callable[..., Loader]] = {"arrow": ArrowLoader, "reference": ReferenceLoader}


def build_loader(
    directory: str | Path | RemotePath,
    *,
    split: str,
    config: LoaderConfig,
    rank: int = 0,
    world_size: int = 1,
    impl: str = "arrow",
    on_damage: Callable[[DataError, int], None] | None = None,
) -> Loader:
    """A Loader of one split of the data set in `directory`, or at a URL (through fsspec), for this rank.

    All ranks must pass the same directory content, split and config. Footers are read and checked here, rows are not.
    on_damage: None = a row group that cannot be used ends reading with its DataError. Otherwise it hears of the error
        and the group's rows, and reading goes on without them: batches keep their global_rows and come with fewer rows.
        It is called every time the group is met, by whichever rank reads it, from the reading thread ("arrow" only).
        With config.base_batch the group's whole window is left out, and it hears of each group of it (loader.py: why).
    impl: "arrow" (the one to use) or "reference" (the definition in plain Python: slow, all rows in memory, for tests).

    Raises DataError for absent, unreadable or unfitting data and ValueError for arguments. Warns, on rank 0, where
    windows are too small for config.base_pool.

    >>> import tempfile
    >>> from gem_data.testing import write_tiny
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     schema = write_tiny(directory, train_rows=10, eval_rows=4, seed=0)
    ...     loader = build_loader(directory, split="train", config=LoaderConfig(global_batch_size=4))
    ...     [(batch.step, len(batch.sample_ids)) for batch in loader.epoch()]
    [(0, 4), (1, 4), (2, 2)]
    """
    if impl not in _LOADERS:
        raise ValueError(f"impl: expected one of {sorted(_LOADERS)}, came {impl!r}")
    if impl != "arrow":
        local_only(directory, f"impl {impl!r}")
    extra: dict[str, Any] = {} if on_damage is None else {"on_damage": on_damage}
    if extra and impl != "arrow":
        raise ValueError(f'on_damage: expected impl "arrow", which alone can leave row groups out, came {impl!r}')
    loader = _LOADERS[impl](directory, split=split, config=config, rank=rank, world_size=world_size, **extra)
    if isinstance(loader, ArrowLoader):
        warn_of_small_windows(loader)
    return loader
