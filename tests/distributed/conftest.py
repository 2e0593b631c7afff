"""Shared by the tests that start several processes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Folders of tests are no packages: forked_ranks.py is found here, what it forks ranks by beside the reliability tests.
HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.with_name("reliability"))]


def pytest_sessionfinish() -> None:
    """End the processes that ranks were forked from, where there were any."""
    forked_ranks = sys.modules.get("forked_ranks")
    if forked_ranks is not None:
        for zygote in forked_ranks.ZYGOTES.values():
            zygote.close()


@pytest.fixture
def spoil(tmp_path: Path) -> Callable[[Path], tuple[Path, Path]]:
    """data -> (a copy with NaN as label of row 10 of row group 3, its changed file).

    Row groups hold 40 rows; schema.json keeps the hashes of the file as it was.
    """

    def copy(data: Path) -> tuple[Path, Path]:
        spoilt = tmp_path / "data"
        shutil.copytree(data, spoilt)
        path = next(spoilt.glob("train-*.parquet"))
        table = pq.read_table(path)
        labels = table["label.click"].to_numpy().copy()
        labels[130] = np.nan
        index = table.column_names.index("label.click")
        changed = table.set_column(index, "label.click", pa.array(labels, pa.float32()))
        pq.write_table(changed, path, row_group_size=40, write_page_checksum=True)
        return spoilt, path

    return copy
