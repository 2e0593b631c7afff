"""An implementation of gem_data.interface.Loader that lives outside Gemline's packages.

It hands out the batches of the shipped loader and writes the ids of every sample that was trained into a ledger, one
line a step. It imports only what gem_data promises (interface and api), inherits nothing and is registered nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gem_data.api import build_loader
from gem_data.interface import Batch, Loader, LoaderConfig, Schema


class LedgerLoader:
    """See gem_data.interface.Loader. ledger: a text file that is appended to; None writes none."""

    def __init__(
        self,
        directory: str | Path,
        *,
        split: str,
        config: LoaderConfig,
        rank: int = 0,
        world_size: int = 1,
        ledger: Path | None = None,
    ) -> None:
        self._inner: Loader = build_loader(directory, split=split, config=config, rank=rank, world_size=world_size)
        self._ledger = ledger

    @property
    def schema(self) -> Schema:
        return self._inner.schema

    @property
    def rows_per_epoch(self) -> int:
        return self._inner.rows_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        return self._inner.batches_per_epoch

    def epoch(self) -> Iterator[Batch]:
        return self._inner.epoch()

    def mark_trained(self, batch: Batch) -> None:
        self._inner.mark_trained(batch)
        if self._ledger is not None:
            with self._ledger.open("a") as file:
                file.write(" ".join(map(str, [batch.step, *batch.sample_ids.tolist()])) + "\n")

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def close(self) -> None:
        self._inner.close()
