"""From a name or a path to a directory of data."""

from __future__ import annotations

import pytest
from gem_pipelines import data_source
from gem_pipelines.config import DataConfig
from gem_pipelines.data_source import cache_directory, data_directory, parse_options
from gem_pipelines.errors import ConfigError


def test_a_directory_is_taken_as_it_is(runtime, debug_data):
    config = DataConfig(source=str(debug_data))
    assert data_directory(config, runtime=runtime, say=pytest.fail) == debug_data


def test_a_named_data_set_is_prepared_once(runtime, tmp_path):
    config = DataConfig(source="parity", options=("rows=200",), cache=str(tmp_path / "cache"))
    said = []
    first = data_directory(config, runtime=runtime, say=said.append)
    assert len(said) == 1
    assert data_directory(config, runtime=runtime, say=pytest.fail) == first
    assert first.parent == tmp_path / "cache"


def test_other_options_are_another_directory(tmp_path):
    directories = {
        cache_directory(DataConfig(source="parity", options=options, cache=str(tmp_path)))
        for options in ((), ("rows=20000",), ("rows=300",), ("rows=300", "seed=1"))
    }
    assert len(directories) == 3  # the second spells the default


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("no/such/place", (), r"data\.source is 'no/such/place', expected a directory with schema\.json or the name"),
        ("synthetik", (), "did you mean 'synthetic'"),
        ("parity", ("rows",), "option 'rows' of data set 'parity': expected name=value"),
        ("parity", ("rows=many",), "option 'rows' of data set 'parity' is 'many', expected int"),
        ("parity", ("row=3",), "data set 'parity' has no option 'row'; did you mean 'rows'"),
        ("parity", ("rows=3",), "rows must be at least 100, got 3"),
    ],
)
def test_mistakes_are_named(runtime, tmp_path, source, options, message):
    config = DataConfig(source=source, options=options, cache=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=message):
        data_directory(config, runtime=runtime, say=lambda line: None)
    assert not list(tmp_path.glob("cache/*/schema.json"))


def test_a_data_set_that_cannot_be_fetched_says_why(runtime, tmp_path, monkeypatch):
    def offline(name, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(data_source.gem_datasets, "load", offline)
    config = DataConfig(source="parity", cache=str(tmp_path))
    with pytest.raises(ConfigError, match="data set 'parity' could not be prepared: no route to host"):
        data_directory(config, runtime=runtime, say=lambda line: None)


def test_types_of_options():
    assert parse_options("synthetic", ("rows=500", "click_rate=0.2")) == {"rows": 500, "click_rate": 0.2}
