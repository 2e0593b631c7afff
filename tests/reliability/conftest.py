"""Jobs and small data for the procedures of reliability; `--full` and `--seed` are options of tests/conftest.py."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # super_jobs.py, the harness that several procedures share


def _pipeline_fixtures():  # type: ignore[no-untyped-def]
    """The module of tests/pipelines/conftest.py: small data, and jobs of the debug recipe."""
    path = Path(__file__).parents[1] / "pipelines" / "conftest.py"
    spec = importlib.util.spec_from_file_location("pipelines_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_shared = _pipeline_fixtures()
debug_data, runtime, debug_config = _shared.debug_data, _shared.runtime, _shared.debug_config
make_job, take_steps, state_of = _shared.make_job, _shared.take_steps, _shared.state_of


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[..., None]:
    """counted("flips", 200, of=200): a figure of this test, printed and kept as a property of its report."""

    def note(name: str, value: object, **more: object) -> None:
        text = f"{value}" + "".join(f" {key} {item}" for key, item in more.items())
        print(f"{request.node.name}: {name} {text}")
        request.node.user_properties.append((name, text))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Every procedure's seed and what it counted, passed or not."""
    lines = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            found = dict(report.user_properties) if report.when == "call" else {}
            if found:
                shown = ", ".join(f"{name} {value}" for name, value in found.items())
                lines.append(f"{Path(report.nodeid).name}: {shown}")
    if lines:
        terminalreporter.section("reliability")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def zygote():
    """What the jobs of a file are forked from."""
    from super_jobs import Zygote

    zygote = Zygote()
    yield zygote
    zygote.close()
