"""The Python examples of the documentation run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    pytest.param(path, block, id=f"{path.stem}-{number}")
    for path in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL))
]


def test_examples_were_found() -> None:
    assert len(BLOCKS) >= 1


@pytest.mark.parametrize(("path", "block"), BLOCKS)
def test_example_runs(path: Path, block: str) -> None:
    exec(compile(block, str(path), "exec"), {"__name__": "example"})
