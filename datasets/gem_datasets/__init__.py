"""Data sets in Gemline's native columns: importers of public data and seeded generators.

    prepared = gem_datasets.load("ml-100k")
    prepared.schema     plain dict, the content of schema.json without `files`
    prepared.train      pyarrow.Table, columns as in the native layout
    prepared.eval       pyarrow.Table, every row strictly later than every row of `train`

Nothing here knows the package that writes or reads the layout: a plain dict and Arrow tables cross the border.
Importing this module loads no data set and touches no network.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import Any

from gem_datasets.prepared import CREATED_BY, DatasetError, PreparedData

__all__ = ["CREATED_BY", "DatasetError", "PreparedData", "load", "names", "options_type"]

# name -> (module, options dataclass); each module has `prepare(options) -> PreparedData`.
_DATASETS = {
    "ml-100k": ("gem_datasets.ml_100k", "MovieLensOptions"),
    "openbandit": ("gem_datasets.openbandit", "OpenBanditOptions"),
    "parity": ("gem_datasets.parity", "ParityOptions"),
    "synthetic": ("gem_datasets.synthetic", "SyntheticOptions"),
}


def names() -> tuple[str, ...]:
    """The names that `load` knows, sorted."""
    return tuple(sorted(_DATASETS))


def options_type(name: str) -> type:
    """The frozen dataclass whose fields are the options of data set `name` (for command lines and documentation)."""
    module, options = _find(name)
    return getattr(importlib.import_module(module), options)  # type: ignore[no-any-return]


def load(name: str, **options: Any) -> PreparedData:
    """Fetch or generate data set `name` and return it in the native columns.

    name     one of `names()`
    options  fields of `options_type(name)`; what is not given keeps its default

    Raises DatasetError (a ValueError) for an unknown name or option (with the nearest known one), for an option out
    of range, and where the data cannot be fetched or is not what it should be.
    """
    module, _ = _find(name)
    kind = options_type(name)
    known = [field.name for field in dataclasses.fields(kind)]
    for option in options:
        if option not in known:
            raise DatasetError(
                f"data set {name!r} has no option {option!r}{_suggest(option, known)}; "
                f"known options: {', '.join(known)}"
            )
    return importlib.import_module(module).prepare(kind(**options))  # type: ignore[no-any-return]


def _find(name: str) -> tuple[str, str]:
    if name not in _DATASETS:
        raise DatasetError(
            f"unknown data set {name!r}{_suggest(str(name), list(_DATASETS))}; known: {', '.join(names())}"
        )
    return _DATASETS[name]


def _suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
