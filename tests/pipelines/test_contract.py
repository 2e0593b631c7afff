"""Interface versions that do not fit stop a run, before anything of the packages is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from gem_pipelines.contract import REQUIRED, check_versions, compare_versions, installed_versions
from gem_pipelines.doctor import check_interfaces
from gem_pipelines.errors import RunError

LOWER: dict[str, str] = {}
"""Package -> why this pipeline is content with less than what it is developed with."""


def test_what_is_installed_fits():
    check_versions(installed_versions())
    assert set(installed_versions()) == set(REQUIRED)


def test_required_is_what_is_installed():
    """A lower requirement was tried with nothing: an older package lacks names that the pipeline imports."""
    lower = {name for name, version in installed_versions().items() if version != REQUIRED[name]}
    assert lower == set(LOWER), "raise REQUIRED in contract.py, or say in LOWER why the older version will do"


def test_the_text_says_what_the_module_says(monkeypatch):
    """Read from interface.py, or taken from the imported module."""
    import gem_attention.interface

    monkeypatch.setattr(gem_attention.interface, "INTERFACE_VERSION", (7, 7))
    assert installed_versions()["gem_attention"] == (7, 7)
    monkeypatch.delitem(sys.modules, "gem_attention.interface")
    assert installed_versions()["gem_attention"] == REQUIRED["gem_attention"]


NEEDED = ".".join(map(str, REQUIRED["gem_embeddings"]))


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


@pytest.mark.parametrize(
    ("interface", "said"),
    [
        ("INTERFACE_VERSION = (1, 4)\n", f"gem_embeddings: interface 1.4 is installed, this pipeline needs {NEEDED}"),
        ("", "gem_embeddings is installed, but its interface.py declares no INTERFACE_VERSION"),
    ],
)
@pytest.mark.parametrize("command", [("train", "--recipe", "debug"), ("plan",), ("data", "verify", "nowhere")])
def test_an_older_package_is_named_before_it_is_imported(tmp_path, interface, said, command):
    """One message, where the import of a name that it lacks would be a traceback."""
    package = tmp_path / "gem_embeddings"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "interface.py").write_text(interface)
    done = subprocess.run(
        [sys.executable, "-m", "gem_pipelines", *command],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_says_versions_and_what_does_not_fit(monkeypatch):
    ours = check_interfaces()
    assert ours.status == "ok"
    assert f"gem_data {'.'.join(map(str, REQUIRED['gem_data']))}" in ours.found
    monkeypatch.setitem(REQUIRED, "gem_data", (2, 0))
    assert check_interfaces().status == "error"
    assert "this pipeline needs 2.0" in check_interfaces().found


@pytest.mark.parametrize(
    ("stored", "forbidden", "said"),
    [
        ({"gem_data": [1, 6]}, [], []),
        ({"gem_data": [1, 5]}, [], ["interface gem_data: stored 1.5, installed 1.6"]),
        ({"gem_data": [1, 7]}, [], ["interface gem_data: stored 1.7, installed 1.6"]),
        ({"gem_data": [2, 6]}, ["interface gem_data: stored 2.6, installed 1.6"], []),
        ({}, [], ["interface gem_data: no version is stored, installed 1.6"]),
        ({"gem_data": [1, 6], "gem_old": [1, 0]}, [], ["interface gem_old: stored 1.0, installed none"]),
        ({"gem_data": "1.6"}, ["interface gem_data: stored '1.6', which is no version [major, minor]"], []),
        ({"gem_data": [1, 6.0]}, ["interface gem_data: stored [1, 6.0], which is no version [major, minor]"], []),
    ],
)
def test_stored_versions_are_compared(stored, forbidden, said):
    found = compare_versions(stored, {"gem_data": (1, 6)})
    assert [line.partition(" (needed")[0] for line in found[0]] == forbidden
    assert found[1] == said
