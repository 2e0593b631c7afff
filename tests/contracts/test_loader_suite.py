"""The loader's suite has a case for every field of LoaderConfig, and tells loaders that are wrong in one thing."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gem_data.api import build_loader
from gem_data.conformance_settings import SETTINGS
from gem_data.interface import Batch, LoaderConfig
from gem_data.testing import Quirks, conformance_cases
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FIELDS = [field.name for field in dataclasses.fields(LoaderConfig)]


@functools.cache
def cases():
    return {case.name: case for case in conformance_cases(Quirks())}


def test_every_field_has_a_case():
    assert sorted(SETTINGS) == sorted(FIELDS)
    assert sorted(n.removeprefix("setting: ") for n in cases() if n.startswith("setting: ")) == sorted(FIELDS)


# What a field is reset to; global_batch_size alone has no default.
DEFAULTS = LoaderConfig(global_batch_size=16)


@pytest.mark.parametrize("field", FIELDS)
def test_a_loader_that_drops_a_setting_is_told(field: str, tmp_path: Path):
    def deaf(directory: Path, *, config: LoaderConfig, **arguments: Any):
        config = dataclasses.replace(config, **{field: getattr(DEFAULTS, field)})
        return build_loader(directory, config=config, **arguments)

    with pytest.raises((AssertionError, ValueError)):
        cases()[f"setting: {field}"].run(deaf, tmp_path)


class Wrong:
    """The shipped loader, each of its batches changed."""

    def __init__(self, directory: Path, change: Any, **arguments: Any) -> None:
        self.inner, self.change = build_loader(directory, **arguments), change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def epoch(self):
        return map(self.change, self.inner.epoch())


def cast(batch: Batch, part: str) -> Batch:
    """One of a batch's tensors in another dtype, with the same values."""
    kinds = {torch.float32: torch.float64, torch.int64: torch.int32}
    inner = part.rpartition(".")[2]
    if part.startswith("ids."):
        held = {"values": batch.ids.values(), "lengths": batch.ids.lengths()}
        held[inner] = held[inner].int()
        return dataclasses.replace(batch, ids=KeyedJaggedTensor(keys=batch.ids.keys(), **held))
    if part.startswith("streams."):
        stream = batch.streams["views"]
        changed = dataclasses.replace(stream, **{inner: getattr(stream, inner).to(torch.int16)})
        return dataclasses.replace(batch, streams={**batch.streams, "views": changed})
    tensor = getattr(batch, part)
    return dataclasses.replace(batch, **{part: tensor.to(kinds[tensor.dtype])})


TENSORS = [f.name for f in dataclasses.fields(Batch) if f.name not in ("ids", "streams", "global_rows", "step")]
PARTS = [*TENSORS, "ids.values", "ids.lengths"]
PARTS += [f"streams.views.{part}" for part in ("offsets", "actions", "times")]


@pytest.mark.parametrize("part", PARTS)
def test_a_tensor_of_another_dtype_is_told(part: str, tmp_path: Path):
    case = cases()["types of a batch of requests" if part == "requests" else "types of a batch"]
    with pytest.raises(AssertionError, match=rf"{re.escape(part)}: expected torch\."):
        case.run(lambda d, **k: Wrong(d, functools.partial(cast, part=part), **k), tmp_path)


def test_what_is_left_out_says_why_and_is_refused(tmp_path: Path):
    quirks = Quirks(skipped_settings={"base_batch": "rows stay where they are", "readers": "one thread"})
    found = {case.name: case for case in conformance_cases(quirks)}
    assert found["setting: base_batch"].skipped == "quirk: no base_batch: rows stay where they are"
    assert found["setting: readers"].skipped == "quirk: no readers: one thread"
    assert set(found) - set(cases()) == {"setting: base_batch is refused"}

    def drops(directory: Path, *, config: LoaderConfig, **arguments: Any):
        return build_loader(directory, config=dataclasses.replace(config, base_batch=None), **arguments)

    def refuses(directory: Path, *, config: LoaderConfig, **arguments: Any):
        if config.base_batch is not None:
            raise ValueError("base_batch: expected None, rows stay where they are")
        return build_loader(directory, config=config, **arguments)

    refusal = found["setting: base_batch is refused"]
    with pytest.raises(AssertionError, match="expected ValueError, nothing was raised"):
        refusal.run(drops, tmp_path)
    refusal.run(refuses, tmp_path)
    # What a loader left out would change is refused, all of it; "shuffle" and what belongs to it have a Quirk.
    fields = {field.name for field in dataclasses.fields(LoaderConfig)}
    unchanged = {"global_batch_size", "prefetch", "readers", "seed", "shuffle", "window_groups"}
    everything = conformance_cases(Quirks(skipped_settings=dict.fromkeys(fields, "left out")))
    refused = {case.name.split()[1] for case in everything if case.name.endswith("is refused")}
    assert refused == fields - unchanged
    with pytest.raises(ValueError, match=r"expected fields of LoaderConfig, came \['base_bach'\]"):
        conformance_cases(Quirks(skipped_settings={"base_bach": ""}))
