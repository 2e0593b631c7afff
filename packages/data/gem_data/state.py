"""The loader's state as JSON: written from a position, and read back only if everything agrees.

    {"order_version": 1, "split": "train",
     "files":  [{"path", "rows", "bytes", "row_groups", "xxh3"}, ...],
     "config": {every LoaderConfig setting that decides which rows a batch has; prefetch and readers do not},
     "epoch": 1, "step": 12, "samples": 3000,
     "shards": [{"rows_read": 250, "file": "train-00000.parquet", "row_group": 3, "row": 17}, ...]}

"file", "row_group" and "row" say where the shard's next row is read (null when it has given all its rows this epoch).
They follow from "rows_read" and the plan; reading a state recomputes them and the sums that must hold, so a state that
was edited, or made from other data or by another order, is refused with the first difference named. With base batches
(LoaderConfig.base_batch) they name the place in the order before base batches are moved: that needs no row to be read,
and which rows were trained follows from it and the settings.

What a file contains is told by the hash that schema.json states for it (FileInfo.xxh3): nothing is read again, so a
file that was replaced without its schema.json is found by verify_dataset and not here. Data sets written before version
1.1 have no hash, and states made from them no "xxh3": they go together as they did, by path, size, rows and row groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gem_data.batching import ORDER_VERSION, Cursor, Plan
from gem_data.cost import cost_to_dict
from gem_data.interface import DataError, LoaderConfig
from gem_data.schema import did_you_mean
from gem_data.shards import Footer

_KEYS = ("order_version", "split", "files", "config", "epoch", "step", "samples", "shards")
_FREE_SETTINGS = ("prefetch", "readers", "open_ids")
_LATER_SETTINGS = MappingProxyType(
    {"base_batch": None, "base_pool": 256, "cost": None, "features": [], "labels": [], "stochastic_length": None}
)

_TODO = "Resume with the setting of the state, or start anew."
_COST_TODO = (
    "The order of rows follows from every bit of it. Resume with the cost of the state (cost_from_dict reads it; a job "
    "reads it from a file), or start anew."
)


def build_state(
    plan: Plan, cursor: Cursor, split: str, config: LoaderConfig, footers: Sequence[Footer]
) -> dict[str, Any]:
    """The JSON-able state of position `cursor`."""
    return {
        "order_version": ORDER_VERSION,
        "split": split,
        "files": _files(footers),
        "config": _settings(config),
        "epoch": cursor.epoch,
        "step": cursor.step,
        "samples": cursor.samples,
        "shards": _places(plan, cursor.epoch, cursor.taken, footers),
    }


def cursor_from_state(
    state: Mapping[str, Any], plan: Plan, split: str, config: LoaderConfig, footers: Sequence[Footer]
) -> Cursor:
    """The position that `state` names. Raises DataError naming the first thing that differs."""
    if not isinstance(state, Mapping):
        raise DataError(f"loader state: expected an object, came {type(state).__name__}.")
    for key in state:
        if key not in _KEYS:
            raise DataError(f'loader state: unknown key "{key}"{did_you_mean(str(key), _KEYS)}.')
    for key in _KEYS:
        if key not in state:
            raise DataError(f'loader state: the key "{key}" is missing.')
    _same("order_version", state["order_version"], ORDER_VERSION, "It was written by a gem_data of another row order.")
    _same("split", state["split"], split, "Load it into a loader of the same split.")
    same_files(state["files"], _files(footers))
    _same_settings(state["config"], _settings(config))
    return _position(state, plan, config, footers)


def _position(state: Mapping[str, Any], plan: Plan, config: LoaderConfig, footers: Sequence[Footer]) -> Cursor:
    epoch, step, samples = (_count(state[key], key) for key in ("epoch", "step", "samples"))
    shards = state["shards"]
    if not isinstance(shards, list) or len(shards) != config.logical_shards:
        raise DataError(f"loader state: shards: expected a list of {config.logical_shards}, came {shards!r:.80}.")
    for number, shard in enumerate(shards):
        if not isinstance(shard, Mapping) or "rows_read" not in shard:
            raise DataError(f'loader state: shards[{number}]: expected an object with "rows_read", came {shard!r:.80}.')
    taken = tuple(_count(shard["rows_read"], f"shards[{number}].rows_read") for number, shard in enumerate(shards))
    for number, (rows_read, rows) in enumerate(zip(taken, plan.epoch(epoch).shard_rows.tolist(), strict=True)):
        if rows_read > rows:
            raise DataError(f"loader state: shards[{number}].rows_read: expected at most {rows}, came {rows_read}.")
    done, size = sum(taken), config.global_batch_size
    if done % size or done >= plan.rows_per_epoch:
        raise DataError(
            f"loader state: shards: expected rows_read to add up to a multiple of global_batch_size {size} below "
            f"{plan.rows_per_epoch}, came {done}. A state is taken between batches."
        )
    _same("samples", samples, epoch * plan.rows_per_epoch + done, "It does not fit epoch and shards: it was changed.")
    _same(
        "step", step, epoch * plan.batches_per_epoch + done // size, "It does not fit epoch and shards: it was changed."
    )
    for number, (came, wanted) in enumerate(zip(shards, _places(plan, epoch, taken, footers), strict=True)):
        _same(f"shards[{number}]", dict(came), wanted, "The next row is another one: the data or the order changed.")
    return Cursor(epoch=epoch, step=step, samples=samples, taken=taken)


def _places(plan: Plan, epoch: int, taken: Sequence[int], footers: Sequence[Footer]) -> list[dict[str, Any]]:
    paths = {footer.index: footer.info.path for footer in footers}
    places = []
    for shard, rows_read in enumerate(taken):
        place = plan.epoch(epoch).row_at(shard, rows_read)
        file, group, row = (None, None, None) if place is None else (paths[place[0]], place[1], place[2])
        places.append({"rows_read": rows_read, "file": file, "row_group": group, "row": row})
    return places


def _files(footers: Sequence[Footer]) -> list[dict[str, Any]]:
    return [
        {
            "path": footer.info.path,
            "rows": footer.info.rows,
            "bytes": footer.bytes,
            "row_groups": len(footer.group_rows),
            "xxh3": footer.info.xxh3,
        }
        for footer in footers
    ]


def _settings(config: LoaderConfig) -> dict[str, Any]:
    settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in _FREE_SETTINGS}
    settings |= {"features": list(config.features), "labels": list(config.labels)}
    if config.cost is not None:
        settings["cost"] = cost_to_dict(config.cost)
    return settings


def same_files(came: Any, wanted: list[dict[str, Any]], *, grown: bool = False) -> None:
    """Raise DataError where the files of a state are not those of the loader; grown: of which there may be more."""
    if not isinstance(came, list):
        raise DataError(f"loader state: files: expected a list, came {type(came).__name__}.")
    todo = "The data changed since: resume with the files it was made from."
    for number, (left, right) in enumerate(zip(came, wanted, strict=False)):
        if not isinstance(left, Mapping):
            raise DataError(f"loader state: files[{number}]: expected an object, came {left!r:.80}.")
        left = {**left, "xxh3": left.get("xxh3", "")}
        if {**left, "xxh3": ""} == {**right, "xxh3": ""} and left["xxh3"] != right["xxh3"]:
            path = right["path"]
            raise DataError(
                f"loader state: files[{number}]: {path}: the state has {_hash(left['xxh3'])}, this loader "
                f"{_hash(right['xxh3'])}. {todo}",
                file=path,
            )
        _same(f"files[{number}]", left, right, todo)
    if not (grown and len(came) < len(wanted)):
        _same("files", len(came), len(wanted), "(number of files) The data changed since: resume with the same files.")


def _hash(value: Any) -> str:
    return f"xxh3 {value}" if value else "no xxh3"


def _same_settings(came: Any, wanted: dict[str, Any]) -> None:
    if not isinstance(came, Mapping):
        raise DataError(f"loader state: config: expected an object, came {type(came).__name__}.")
    for key in came:
        if key not in wanted:
            raise DataError(f'loader state: config: unknown setting "{key}"{did_you_mean(str(key), wanted)}.')
    for key, value in wanted.items():
        if key not in came:
            # A state written before the setting existed was made as its default says.
            if key in _LATER_SETTINGS and value == _LATER_SETTINGS[key]:
                continue
            raise DataError(f'loader state: config: the setting "{key}" is missing.')
        _same(f"config.{key}", came[key], value, _COST_TODO if key == "cost" else _TODO)


def _same(what: str, came: Any, wanted: Any, todo: str) -> None:
    if type(came) is not type(wanted) or came != wanted:
        raise DataError(f"loader state: {what}: the state has {came!r}, this loader {wanted!r}. {todo}")


def _count(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:
        raise DataError(f"loader state: {what}: expected a whole number >= 0, came {value!r}.")
    return value
