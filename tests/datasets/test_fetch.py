"""Fetching without a network: pip is replaced by a function that drops an archive, or fails."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from gem_datasets import fetch as fetching
from gem_datasets.fetch import Member, Source, default_cache_dir, fetch
from gem_datasets.prepared import DatasetError

FILES = {"pkg/data/a.csv": b"first file", "pkg/data/b.csv": b"second file"}


def source_of(*, sha256=None, size=None, name="pkg/data/a.csv", flags=()):
    def member(path, content):
        return Member(
            archive_name=path,
            name=f"sub/{Path(path).name}",
            size_bytes=size or len(content),
            sha256=sha256 or hashlib.sha256(content).hexdigest(),
        )

    members = (member(name, FILES["pkg/data/a.csv"]), member("pkg/data/b.csv", FILES["pkg/data/b.csv"]))
    return Source(requirement="pkg==1.0", folder="pkg-1.0", members=members, pip_flags=flags)


def write_wheel(folder):
    with zipfile.ZipFile(folder / "pkg-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("../../escape.txt", b"no")
        for name, content in FILES.items():
            archive.writestr(name, content)


def write_sdist(folder):
    with tarfile.open(folder / "pkg-1.0.tar.gz", "w:gz") as archive:
        for name, content in {"../escape.txt": b"no", **FILES}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def pip(monkeypatch):
    """pip(write): `pip download` runs write(destination) and exits with 0; returns the commands it was called with."""
    commands = []

    def install(write, *, returncode=0, stderr=""):
        def run(command, **_):
            commands.append(command)
            write(Path(command[command.index("--dest") + 1]))
            return subprocess.CompletedProcess(command, returncode, "", stderr)

        monkeypatch.setattr(fetching.subprocess, "run", run)
        return commands

    return install


@pytest.mark.parametrize("write", [write_wheel, write_sdist])
def test_only_the_named_files_arrive_and_only_once(pip, tmp_path, write):
    commands = pip(write)
    source = source_of(flags=("--no-binary", ":all:"))
    folder = fetch(source, tmp_path / "cache")
    assert fetch(source, tmp_path / "cache") == folder == tmp_path / "cache" / "pkg-1.0"
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"cache/pkg-1.0/sub/a.csv", "cache/pkg-1.0/sub/b.csv"}
    assert (folder / "sub" / "b.csv").read_bytes() == b"second file"
    assert len(commands) == 1
    assert commands[0][1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--no-binary", ":all:", "pkg==1.0"} <= set(commands[0])


def test_a_missing_file_is_fetched_again(pip, tmp_path):
    commands = pip(write_wheel)
    folder = fetch(source_of(), tmp_path)
    (folder / "sub" / "a.csv").unlink()
    fetch(source_of(), tmp_path)
    assert (folder / "sub" / "a.csv").read_bytes() == b"first file"
    assert len(commands) == 2


def test_without_a_network_the_error_says_what_works(pip, tmp_path):
    pip(lambda folder: None, returncode=1, stderr="line\nERROR: No matching distribution found for pkg==1.0")
    with pytest.raises(DatasetError, match=r"(?s)cannot fetch pkg==1.0.*`--data synthetic` works.*No matching distr"):
        fetch(source_of(), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_hanging_pip_is_ended(monkeypatch, tmp_path):
    def run(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(fetching.subprocess, "run", run)
    with pytest.raises(DatasetError, match=r"did not finish within 7 s; `--data synthetic` works"):
        fetch(source_of(), tmp_path, timeout_s=7.0)


@pytest.mark.parametrize("write", [write_wheel, write_sdist])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, r"pkg/data/a.csv in pkg-1.0.*: SHA-256 [0-9a-f]{64}, expected 0{64}"),
        ({"size": 3}, r"pkg/data/a.csv in pkg-1.0.*: 10 bytes, expected 3"),
        ({"name": "pkg/data/c.csv"}, r"pkg-1.0.* has no file pkg/data/c.csv"),
    ],
)
def test_an_archive_that_is_not_as_pinned_leaves_nothing(pip, tmp_path, write, change, message):
    pip(write)
    with pytest.raises(DatasetError, match=message):
        fetch(source_of(**change), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_damaged_cache_is_named(pip, tmp_path):
    pip(write_wheel)
    folder = fetch(source_of(), tmp_path)
    (folder / "sub" / "a.csv").write_bytes(b"first fi1e")
    with pytest.raises(DatasetError, match=r"sub/a.csv \(delete it to fetch it again\): SHA-256"):
        fetch(source_of(), tmp_path)


def test_the_cache_follows_the_environment_at_call_time(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert default_cache_dir() == Path("/some/cache/gemline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "gemline"
