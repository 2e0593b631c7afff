"""The examples in the README and in docstrings run, with the numbers they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "data" / "README.md"
MODULES = ["api", "batching", "schema", "single", "writing"]


def test_readme() -> None:
    found = doctest.testfile(str(README), module_relative=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert found.failed == 0
    assert found.attempted > 15


def test_the_readme_shows_the_real_message() -> None:
    """doctest does not compare the message of an exception reliably over packages, so it is compared here."""
    import pyarrow as pa
    from gem_data.api import batch_from_table
    from gem_data.interface import DataError
    from gem_data.testing import tiny_schema, tiny_table

    table = tiny_table(rows=2, seed=0)
    table = table.set_column(table.column_names.index("id.item"), "id.item", pa.array([3, 50]))
    with pytest.raises(DataError) as caught:
        batch_from_table(tiny_schema(), table)
    assert str(caught.value).split(", ", 1)[1] in README.read_text()


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"gem_data.{name}"))
    assert found.failed == 0
    assert found.attempted > 0
