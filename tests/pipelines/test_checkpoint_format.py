"""The checkpoint directory: round trip, every kind of damage, nothing half written."""

from __future__ import annotations

import hashlib
import json
import os
import random

import pytest
import torch
from gem_pipelines import checkpoint_format
from gem_pipelines.checkpoint_format import Checkpoint, list_steps, read_checkpoint, step_directory, write_checkpoint
from gem_pipelines.checkpoint_manifest import MANIFEST, canonical_json, find_damage, read_manifest, state_digest
from gem_pipelines.errors import CheckpointError

TENSORS = {
    "dense.w": torch.randn(7, 5),
    "dense.scalar": torch.tensor(3.5, dtype=torch.float64),
    "dense.empty": torch.zeros(0, 4),
    "dense.flags": torch.tensor([True, False]),
    "dense.half": torch.randn(9).bfloat16(),
    "tables.big.weight": torch.arange(4000, dtype=torch.float32).view(1000, 4),
    "tables.wide.weight": torch.randn(3, 2000),
    "tables.transposed.weight": torch.randn(6, 8).T,
}


def checkpoint(**about: object) -> Checkpoint:
    return Checkpoint(tensors=TENSORS, state={"step": 3, "x": 0.1, "big": 2**60}, about={"created": "now", **about})


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A checkpoint cut into several files."""
    monkeypatch.setattr(checkpoint_format, "SHARD_BYTES", 5000)
    directory = step_directory(tmp_path, 3)
    write_checkpoint(directory, checkpoint())
    return directory


def test_round_trip_over_several_files(written):
    assert len(list(written.glob("tensors-*.safetensors"))) >= 5
    read = read_checkpoint(written)
    assert read.state == checkpoint().state
    assert set(read.tensors) == set(TENSORS)
    for key, tensor in TENSORS.items():
        assert read.tensors[key].dtype == tensor.dtype
        assert torch.equal(read.tensors[key], tensor)
    pieces = read_manifest(written).tensors["tables.big.weight"].pieces
    assert len(pieces) > 1
    assert find_damage(written) == []


def test_any_flipped_bit_is_found(written):
    rng = random.Random(5)
    for path in sorted(written.iterdir()):
        sound = path.read_bytes()
        for bit in rng.sample(range(8 * len(sound)), 30):
            changed = bytearray(sound)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match=path.name):
                read_checkpoint(written)
            assert [damage.file for damage in find_damage(written)] == [path.name]
        path.write_bytes(sound)
    assert find_damage(written) == []


def test_damage_names_the_byte_range(tmp_path):
    directory = step_directory(tmp_path, 1)
    write_checkpoint(directory, Checkpoint(tensors={"t": torch.zeros(900_000)}, state={}, about={}))
    path = directory / "tensors-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[3 * (1 << 20) + 17] ^= 4
    path.write_bytes(data)
    (damage,) = find_damage(directory)
    assert (damage.start, damage.stop) == (3 << 20, len(data))
    assert "bytes 3145728.." in str(damage)


def truncate(directory):
    path = directory / "tensors-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def swap(directory):
    one, two = directory / "tensors-00001.safetensors", directory / "tensors-00002.safetensors"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def link(directory):
    path = directory / "tensors-00001.safetensors"
    path.rename(directory.parent / "elsewhere")
    path.symlink_to(directory.parent / "elsewhere")


DAMAGES = {
    "truncated": (truncate, "tensors-00001.safetensors"),
    "lengthened": (lambda d: (d / "state.json").write_bytes((d / "state.json").read_bytes() + b"x"), "state.json"),
    "emptied": (lambda d: (d / "state.json").write_bytes(b""), "state.json"),
    "missing": (lambda d: (d / "tensors-00000.safetensors").unlink(), "tensors-00000.safetensors"),
    "extra": (lambda d: (d / "tensors-99999.safetensors").write_bytes(b""), "tensors-99999.safetensors"),
    "swapped": (swap, "tensors-00002.safetensors"),
    "linked": (link, "tensors-00001.safetensors"),
    "no manifest": (lambda d: (d / MANIFEST).unlink(), MANIFEST),
    "white space": (lambda d: (d / MANIFEST).write_bytes((d / MANIFEST).read_bytes() + b"\n"), MANIFEST),
}


@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_other_damage_is_found_and_named(written, kind):
    damage, name = DAMAGES[kind]
    damage(written)
    assert name in [found.file for found in find_damage(written)]
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(written)


def rewrite_manifest(directory, change) -> None:
    """Change the manifest and make its SHA-256 right again, as an attacker could."""
    manifest = json.loads((directory / MANIFEST).read_bytes())
    del manifest["sha256"]
    change(manifest)
    manifest["sha256"] = hashlib.sha256(canonical_json(manifest)).hexdigest()
    (directory / MANIFEST).write_bytes(canonical_json(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"][0].update(name="../state.json"), "not allowed"),
        (lambda m: m["files"][0].update(name="/etc/passwd"), "not allowed"),
        (lambda m: m.update(format="other"), "format is 'other'"),
        (lambda m: m.update(format_version=[2, 0]), r"\[2, 0\].*reads \[1, 1\]"),
        (lambda m: m["tensors"]["dense.w"].update(shape=[7, 6]), "'dense.w' is"),
        (lambda m: m["tensors"]["tables.big.weight"]["pieces"].pop(0), "missing or out of order"),
        (lambda m: m.pop("tensors"), "damaged"),
        (lambda m: m.update(files=[3]), "damaged"),
    ],
)
def test_a_well_hashed_but_wrong_manifest_is_refused(written, change, message):
    rewrite_manifest(written, change)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(written)


def test_checkpoints_of_format_1_0_are_read(written):
    """They differ in the number alone: only an incremental checkpoint has a base."""
    rewrite_manifest(written, lambda manifest: manifest.update(format_version=[1, 0]))
    assert "base" not in json.loads((written / MANIFEST).read_bytes())
    assert find_damage(written) == []
    read = read_checkpoint(written)
    assert all(torch.equal(read.tensors[key], tensor) for key, tensor in TENSORS.items())


def test_never_overwrites(written):
    before = state_digest(read_manifest(written))
    with pytest.raises(CheckpointError, match="never overwritten"):
        write_checkpoint(written, checkpoint())
    assert state_digest(read_manifest(written)) == before


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch, failing):
    write_checkpoint(step_directory(tmp_path, 1), checkpoint())

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, fail)
        with pytest.raises(
            CheckpointError, match=r"No space left on device; a checkpoint needs \d+ bytes, \d+ are free"
        ):
            write_checkpoint(step_directory(tmp_path, 2), checkpoint())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert find_damage(step_directory(tmp_path, 1)) == []


def test_steps_are_listed_in_order_and_drafts_are_not(tmp_path):
    for name in ("step-00000020", "step-00000003", ".tmp-step-00000040-1", "step-x", "damaged-step-00000007-0"):
        (tmp_path / name).mkdir()
    assert list_steps(tmp_path) == [3, 20]
    assert list_steps(tmp_path / "absent") == []


def test_digest_sees_the_state_and_not_the_circumstances(tmp_path):
    digests = []
    for number, (scale, created) in enumerate([(1.0, "monday"), (1.0, "tuesday"), (1.0 + 2**-20, "monday")]):
        directory = step_directory(tmp_path, number)
        tensors = {"w": torch.full((3,), scale)}
        write_checkpoint(directory, Checkpoint(tensors=tensors, state={"a": 1}, about={"created": created}))
        digests.append(state_digest(read_manifest(directory)))
    assert digests[0] == digests[1] != digests[2]


def test_nan_in_the_state_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_checkpoint(step_directory(tmp_path, 1), Checkpoint(tensors={}, state={"x": float("nan")}, about={}))
    assert list(tmp_path.iterdir()) == []
