"""S1 to S3: no file runs code when it is loaded, none leads outside its directory, none takes more memory or time than
it should. What is malicious here is well signed: hashes and manifests fit, so that the formats themselves are tested.

Each attack runs in a forked child under an audit hook (armed after everything was imported and used once) and a limit
of memory; what comes back must be one of our named errors.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gem_data.api import build_loader, inspect_dataset, read_schema, verify_dataset
from gem_data.damage import refresh_block_hashes
from gem_data.interface import DataError, LoaderConfig
from gem_data.testing import write_tiny
from gem_pipelines.checkpoint_format import Checkpoint, read_checkpoint, step_directory, write_checkpoint
from gem_pipelines.checkpoint_manifest import FileEntry, block_hashes, find_damage, read_manifest
from gem_pipelines.errors import CheckpointError, ConfigError, RunError
from gem_pipelines.recipes.debug import debug
from gem_pipelines.rundir import RunDirectory

NAMED = (DataError, CheckpointError, ConfigError, RunError)
FORBIDDEN = (
    "pickle.find_class",
    "exec",
    "compile",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "import",
    "marshal.loads",
)
READER = "gem_data.reader_process"
LIMIT_S = 5.0
GROWTH_BYTES = 1 << 30


class Payload:
    """Unpickling it makes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


class SaysError(Exception):
    """The audit hook stopped something."""


def attacked(action: Callable[[], Any], *, root: Path | None = None) -> str:
    """Run `action` in a child under the hook: "named: ...", "passed", or what went wrong. root: where files may be
    opened for writing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.write(write, _in_child(action, root).encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read().decode()
    status = os.waitpid(child, 0)[1]
    return said if status == 0 else f"died {status}"


def _in_child(action: Callable[[], Any], root: Path | None) -> str:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (pages + GROWTH_BYTES, pages + GROWTH_BYTES))
    stopped: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        bad = event in FORBIDDEN and not (event == "import" and arguments[0] in sys.modules)
        if event == "subprocess.Popen":
            bad = READER not in arguments[1]
        if event == "open" and root is not None and isinstance(arguments[0], str) and arguments[2]:
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR)
            bad = bool(writes) and not Path(arguments[0]).resolve().is_relative_to(root)
        if bad:
            stopped.append(f"{event} {arguments[:1]!r:.200}")
            raise SaysError(stopped[-1])

    began = time.monotonic()
    sys.addaudithook(hook)
    try:
        action()
        said = "passed"
    except NAMED as error:
        said = f"named: {type(error).__name__}: {error}"
    except BaseException as error:
        said = f"escaped: {type(error).__name__}: {error}"
    if stopped:
        return f"ran code: {stopped}"
    return said if time.monotonic() - began < LIMIT_S else f"took too long: {said}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A sound checkpoint of two tensors."""
    directory = step_directory(tmp_path_factory.mktemp("checkpoints"), 3)
    tensors = {"dense.w": torch.arange(6.0).view(2, 3), "tables.t.weight": torch.ones(4, 2)}
    write_checkpoint(directory, Checkpoint(tensors=tensors, state={"position": {"step": 3}}, about={}))
    return directory


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory, checkpoint):
    """Everything that is attacked below was imported and used once: later imports would be of files' making."""
    data = tmp_path_factory.mktemp("warm") / "d"
    write_tiny(data)
    read_checkpoint(checkpoint)
    find_damage(checkpoint)
    use_data(data)
    run = RunDirectory(tmp_path_factory.mktemp("warm") / "run")
    run.create(debug(), command="x")
    run.read_config()
    with pytest.raises(ConfigError):
        RunDirectory(spoilt_config(run, {"optimiser": {}})).read_config()
    assert attacked(lambda: read_checkpoint(checkpoint)) == "passed"
    assert attacked(lambda: use_data(data)) == "passed"


def spoilt_config(run: RunDirectory, value: Any) -> Path:
    run.config_file.write_text(json.dumps(value))
    return run.path


def use_data(directory: Path) -> None:
    """Load, inspect and verify a data set."""
    list(build_loader(directory, split="train", config=LoaderConfig(global_batch_size=16, prefetch=0)).epoch())
    inspect_dataset(directory, check=True)
    report = verify_dataset(directory)
    if report.problems:
        raise report.problems[0]


def sign(directory: Path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint, and let the manifest say that this is right."""
    manifest = read_manifest(directory)
    entry = FileEntry(name=name, bytes=len(data), xxh3_64=block_hashes(data))
    files = tuple(entry if old.name == name else old for old in manifest.files)
    (directory / name).write_bytes(data)
    (directory / "manifest.json").write_bytes(dataclasses.replace(manifest, files=files).to_bytes())


def pickled(kind: str, canary: Path) -> bytes:
    """A payload as pickle, as torch.save writes it, or as an object array of numpy."""
    if kind == "pickle":
        return pickle.dumps(Payload(canary))
    file = io.BytesIO()
    if kind == "torch":
        torch.save({"w": Payload(canary)}, file)
    else:
        np.save(file, np.array([Payload(canary)], dtype=object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["pickle", "torch", "numpy"])
def test_s1_no_code_on_load(checkpoint, tmp_path, kind):
    """Payloads in place of every file of a checkpoint, of a data set and of a run."""
    canary = tmp_path / "canary"
    payload = pickled(kind, canary)
    tries = 0
    for name in sorted(path.name for path in checkpoint.iterdir()):
        target = tmp_path / f"c-{name}" / checkpoint.name
        shutil.copytree(checkpoint, target)
        if name == "manifest.json":
            (target / name).write_bytes(payload)
        else:
            sign(target, name, payload)
        assert attacked(lambda target=target: read_checkpoint(target)).startswith("named: CheckpointError"), name
        tries += 1
    for name in ("schema.json", "train-00000.parquet"):
        target = tmp_path / f"d-{name}"
        write_tiny(target)
        (target / name).write_bytes(payload)
        assert attacked(lambda target=target: use_data(target)).startswith("named: DataError"), name
        tries += 1
    run = RunDirectory(tmp_path / "run")
    run.create(debug(), command="x")
    run.config_file.write_bytes(payload)
    assert attacked(run.read_config).startswith("named: RunError")
    assert tries == 5
    assert not canary.exists()


def test_s1_metadata_of_parquet_runs_nothing(tmp_path):
    """pandas and Arrow metadata, extension types and dictionaries with payloads: the columns are read, no more."""
    canary = tmp_path / "canary"
    target = tmp_path / "d"
    write_tiny(target)
    path = target / "train-00000.parquet"
    with pq.ParquetFile(path) as file:
        rows, table = file.metadata.row_group(0).num_rows, file.read()
    bad = pickle.dumps(Payload(canary))
    fields = []
    for field in table.schema:
        extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": bad}
        fields.append(field.with_metadata(extension) if field.name == "id.item" else field)
    schema = pa.schema(fields, metadata={b"pandas": bad})
    pq.write_table(table.cast(schema), path, row_group_size=rows, write_page_checksum=True)
    refresh_block_hashes(path)
    list_of = lambda: list(  # noqa: E731
        build_loader(target, split="train", config=LoaderConfig(global_batch_size=16, prefetch=0)).epoch()
    )
    said = attacked(list_of)
    assert said == "passed" or said.startswith("named: DataError"), said
    assert not canary.exists()


def test_the_hook_sees_what_it_must(tmp_path):
    """The same payload, loaded the forbidden way: the procedure fails as it should."""
    canary = tmp_path / "canary"
    data = pickle.dumps(Payload(canary))
    for forbidden, event in (
        (lambda: pickle.loads(data), "pickle.find_class"),
        (lambda: eval("1 + 1"), "compile"),
        (lambda: subprocess.run(["true"], check=True), "subprocess.Popen"),
    ):
        said = attacked(forbidden)
        assert said.startswith("ran code"), said
        assert event in said
    assert not canary.exists()
    outside = tmp_path / "outside"
    said = attacked(lambda: outside.write_text("x"), root=tmp_path / "inside")
    assert said.startswith("ran code"), said
    assert "open" in said


BAD_NAMES = (
    "../x.json",
    "/etc/passwd",
    "a/b.json",
    ".hidden.json",
    "x\0.json",
    "X.json",
    "x" * 4096 + ".json",
    "..",
    "",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_s2_names_in_a_manifest(checkpoint, tmp_path, name):
    target = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, target)
    manifest = read_manifest(target)
    files = (dataclasses.replace(manifest.files[0], name=name), *manifest.files[1:])
    (target / "manifest.json").write_bytes(dataclasses.replace(manifest, files=files).to_bytes())
    said = attacked(lambda: read_checkpoint(target))
    assert said.startswith("named: CheckpointError"), said
    assert "is not allowed in a checkpoint" in said


@pytest.mark.parametrize("kind", ["link", "hard directory", "pipe", "device"])
def test_s2_files_that_are_none(checkpoint, tmp_path, kind):
    target = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, target)
    state = target / "state.json"
    kept = tmp_path / "elsewhere.json"
    shutil.move(state, kept)
    if kind == "link":
        state.symlink_to(kept)
    elif kind == "pipe":
        os.mkfifo(state)
    elif kind == "device":
        state.symlink_to("/dev/zero")
    else:
        state.mkdir()
    said = attacked(lambda: read_checkpoint(target))
    assert said.startswith("named: CheckpointError"), said
    assert find_damage(target)


BAD_PATHS = ("../train-00000.parquet", "/etc/passwd", "a/../../x.parquet", "x\0y", "x" * 5000, "..", "", "a\\b")


@pytest.mark.slow
@pytest.mark.parametrize("path", BAD_PATHS, ids=range(len(BAD_PATHS)))
def test_s2_paths_in_a_schema(tmp_path, path):
    target = tmp_path / "d"
    write_tiny(target)
    content = json.loads((target / "schema.json").read_text())
    content["files"][0]["path"] = path
    (target / "schema.json").write_text(json.dumps(content))
    said = attacked(lambda: use_data(target))
    assert said.startswith("named: DataError"), said


@pytest.mark.parametrize("entry", ["metrics.jsonl", "checkpoints", "config.json", "tensorboard", "run.lock", "ledger"])
def test_s2_links_in_a_run_directory_are_not_followed(tmp_path, entry):
    """A run directory from somebody else: nothing outside is written, nothing outside is read."""
    run, outside = RunDirectory(tmp_path / "run"), tmp_path / "outside"
    run.create(debug(), command="x")
    outside.mkdir()
    target = outside / entry
    if entry in ("checkpoints", "tensorboard", "ledger"):
        target.mkdir()
        shutil.rmtree(run.path / entry, ignore_errors=True)
    else:
        target.write_text((run.path / entry).read_text() if (run.path / entry).exists() else "precious\n")
        (run.path / entry).unlink(missing_ok=True)
    before = sorted((path.name, path.stat().st_size) for path in outside.iterdir())
    (run.path / entry).symlink_to(target)
    for action in (run.acquire_lock, run.read_config):
        said = attacked(action, root=run.path)
        assert said.startswith("named: RunError"), said
        assert f"{run.path / entry} is a link to {target}" in said
    assert sorted((path.name, path.stat().st_size) for path in outside.iterdir()) == before


def safetensors(header: Any, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


FLOATS = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
BOMBS = {
    "header of 2^63 - 1 bytes": safetensors({}, length=2**63 - 1),
    "header longer than the file": safetensors({}, length=10_000),
    "no header": b"\0\0",
    "overlapping offsets": safetensors({"a": FLOATS, "b": {**FLOATS, "data_offsets": [8, 32]}}, bytes(32)),
    "offsets that go down": safetensors({"a": {**FLOATS, "data_offsets": [24, 0]}}, bytes(24)),
    "shape larger than the data": safetensors({"a": {**FLOATS, "shape": [2**40, 3]}}, bytes(24)),
    "shape that overflows": safetensors({"a": {**FLOATS, "shape": [2**62, 2**62]}}, bytes(24)),
    "negative shape": safetensors({"a": {**FLOATS, "shape": [-2, -3]}}, bytes(24)),
    "unknown dtype": safetensors({"a": {**FLOATS, "dtype": "OBJ"}}, bytes(24)),
    "names twice": safetensors(b'{"a":' + json.dumps(FLOATS).encode() + b',"a":' + json.dumps(FLOATS).encode() + b"}"),
    "deep header": safetensors(b'{"a":' * 100_000),
    "header of a hundred thousand tensors": safetensors({str(n): FLOATS for n in range(100_000)}, bytes(24)),
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_s3_tensors(checkpoint, tmp_path, bomb):
    target = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, target)
    sign(target, "tensors-00000.safetensors", BOMBS[bomb])
    said = attacked(lambda: read_checkpoint(target))
    assert said.startswith("named: CheckpointError"), said


JSON_BOMBS = {
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a number of a million digits": b'{"tables": ' + b"9" * 1_000_000 + b"}",
    "infinity": b'{"name": Infinity}',
    "a key of a million letters": b'{"' + b"k" * 1_000_000 + b'": 1}',
    "hundreds of thousands of keys": json.dumps(dict.fromkeys(map(str, range(300_000)))).encode(),
    "no UTF-8": b'{"name": "\xff\xfe"}',
    "nothing": b"",
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", JSON_BOMBS)
@pytest.mark.parametrize("where", ["schema.json", "config.json", "manifest.json", "state.json"])
def test_s3_json(checkpoint, tmp_path, where, bomb):
    if where == "schema.json":
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / where).write_bytes(JSON_BOMBS[bomb])
        said = attacked(lambda: read_schema(tmp_path / "d"))
    elif where == "config.json":
        run = RunDirectory(tmp_path / "run")
        run.create(debug(), command="x")
        run.config_file.write_bytes(JSON_BOMBS[bomb])
        said = attacked(run.read_config)
    else:
        target = tmp_path / checkpoint.name
        shutil.copytree(checkpoint, target)
        if where == "manifest.json":
            (target / where).write_bytes(JSON_BOMBS[bomb])
        else:
            sign(target, where, JSON_BOMBS[bomb])
        said = attacked(lambda: read_checkpoint(target))
        if where == "state.json" and bomb in (
            "infinity",
            "hundreds of thousands of keys",
            "a key of a million letters",
        ):
            assert said == "passed"  # well-formed JSON: what it says is compared with the run when it is restored
            return
    assert said.startswith("named: "), said
    assert len(said) < 4000 or bomb == "a key of a million letters", len(said)


def test_s3_a_sparse_file_of_100_gb_is_not_read(checkpoint, tmp_path):
    for where in ("schema.json", "config.json", "manifest.json"):
        directory = tmp_path / where
        directory.mkdir()
        with open(directory / where, "wb") as file:
            file.truncate(100 << 30)
        action = {
            "schema.json": lambda d=directory: read_schema(d),
            "config.json": RunDirectory(directory).read_config,
            "manifest.json": lambda d=directory: read_manifest(d),
        }[where]
        said = attacked(action)
        assert said.startswith("named: "), (where, said)
