"""Both loaders prove themselves with the shipped suite, which takes any Loader."""

from __future__ import annotations

from pathlib import Path

import pytest
from gem_data.api import build_loader
from gem_data.testing import Case, Quirks, conformance_cases


@pytest.mark.parametrize("impl", ["arrow", "reference"])
@pytest.mark.parametrize("case", conformance_cases(Quirks()), ids=lambda case: case.name)
def test_conformance(case: Case, impl: str, tmp_path: Path) -> None:
    if case.skipped:
        pytest.skip(case.skipped)
    case.run(lambda directory, **arguments: build_loader(directory, impl=impl, **arguments), tmp_path)
