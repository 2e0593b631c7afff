"""From `data.source` to a directory in the native layout: a directory as it is, a named data set prepared once and
kept.

This is the place where gem_datasets (which makes tables) meets gem_data (which writes and reads the layout); the two
do not know each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gem_datasets
from gem_data.api import data_path, read_schema, select, write_dataset
from gem_data.interface import DataError, Schema
from gem_data.remote import DataPath, RemotePath

from gem_pipelines.config import DataConfig
from gem_pipelines.errors import ConfigError, did_you_mean
from gem_pipelines.runtime import Runtime


def data_directory(config: DataConfig, *, runtime: Runtime, say: Callable[[str], None]) -> DataPath:
    """The directory, or the place behind a URL, to read. A named data set that is not in the cache is prepared by rank
    0 while the others wait.
    """
    path = data_path(config.source)
    if (path / "schema.json").is_file():
        return path
    if isinstance(path, RemotePath):
        raise ConfigError(f"data.source is {config.source!r}: there is no {path / 'schema.json'}")
    if config.source not in gem_datasets.names():
        raise ConfigError(
            f"data.source is {config.source!r}, expected a directory with schema.json or the name of a data set; "
            f"{did_you_mean(config.source, gem_datasets.names())} "
            "('gemline data prepare NAME --out DIR' makes such a directory)"
        )
    target = cache_directory(config)

    def prepare() -> None:
        if not (target / "schema.json").is_file():
            try:
                prepare_named(config.source, config.options, target, say=say)
            except (ValueError, OSError) as problem:
                reason = str(problem) or type(problem).__name__
                raise ConfigError(f"data set {config.source!r} could not be prepared: {reason}") from None

    runtime.on_main(prepare)
    return target


def trained_schema(data: DataPath, config: DataConfig) -> Schema:
    """The schema of `data` with the features and labels that the run uses. ConfigError names the choices."""
    try:
        return select(read_schema(data), features=config.features, labels=config.labels)
    except DataError:
        raise
    except ValueError as problem:
        raise ConfigError(f"data.{problem}") from None


def cache_directory(config: DataConfig) -> Path:
    """Where the data set of `config` is kept; named by its options and by the code that makes it.

    So neither other options nor a changed generator find an older directory.
    """
    options = parse_options(config.source, config.options)
    resolved = dataclasses.asdict(gem_datasets.options_type(config.source)(**options))
    digest = hashlib.sha256(json.dumps(resolved, sort_keys=True, default=str).encode())
    for source in sorted(Path(gem_datasets.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return Path(config.cache) / f"{config.source}-{digest.hexdigest()[:8]}"


def prepare_named(
    name: str,
    options: Sequence[str],
    directory: Path,
    *,
    say: Callable[[str], None],
    rows_per_group: int | None = None,
) -> Schema:
    """Fetch or generate data set `name` and write it to `directory`, all or nothing."""
    parsed = parse_options(name, options)
    say(f"preparing {name} in {directory} ...")
    prepared = gem_datasets.load(name, **parsed)
    directory.parent.mkdir(parents=True, exist_ok=True)
    tables = {"train": prepared.train, "eval": prepared.eval}
    return write_dataset(directory, prepared.schema, tables, rows_per_group=rows_per_group)


def parse_options(name: str, options: Sequence[str]) -> dict[str, Any]:
    """["rows=5000"] -> {"rows": 5000}, by the types of the data set's options. Raises ConfigError or DatasetError."""
    kinds = typing.get_type_hints(gem_datasets.options_type(name))
    parsed: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(f"option {option!r} of data set {name!r}: expected name=value")
        if key not in kinds:
            raise ConfigError(f"data set {name!r} has no option {key!r}; {did_you_mean(key, kinds)}")
        parsed[key] = _parse_value(f"option {key!r} of data set {name!r}", text, kinds[key])
    return parsed


def _parse_value(what: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text not in ("True", "False"):
            raise ConfigError(f"{what} is {text!r}, expected True or False")
        return text == "True"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ConfigError(f"{what} is {text!r}, expected {kind.__name__}") from None
    return text
