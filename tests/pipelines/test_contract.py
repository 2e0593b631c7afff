"""Interface versions that do not fit stop a run."""

from __future__ import annotations

import pytest
from gem_pipelines.contract import REQUIRED, check_versions, installed_versions
from gem_pipelines.errors import RunError


def test_what_is_installed_fits():
    check_versions(installed_versions())
    assert set(installed_versions()) == set(REQUIRED)


@pytest.mark.parametrize(
    ("found", "fits"),
    [((1, 2), True), ((1, 3), True), ((1, 1), False), ((2, 2), False), ((0, 9), False), (None, False)],
)
def test_same_major_and_minor_at_least(found, fits):
    versions = {"gem_data": (1, 0)} | ({"gem_x": found} if found else {})
    required = {"gem_data": (1, 0), "gem_x": (1, 2)}
    if fits:
        check_versions(versions, required)
    else:
        with pytest.raises(RunError, match=r"gem_x: interface .* is installed, this pipeline needs 1\.2"):
            check_versions(versions, required)
