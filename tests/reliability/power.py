"""A disk that loses power: records what a program does to files, and builds what may be left at any moment (T3).

The model is the strictest that POSIX allows. A file's bytes are durable as of its last fsync; later ones may be there,
in part, as zeros, or not at all. A name made, removed or renamed in a directory is durable when that directory was
fsynced; before that each such operation may have happened or not, in any combination, a rename as one. An fsync of a
file does not make its name durable.

    with Recorder(root) as recorder: ...          os.* and open() are watched below root
    recorder.note("step 3 is durable")            a mark among the operations
    crash(recorder.operations[:n], rng, into)     one state that may be left after n operations, as real files
"""

from __future__ import annotations

import builtins
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

WATCHED = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir")
Operation = tuple[Any, ...]


class Recorder:
    """Operations below `root`, in order: ("create", path), ("sync", path, bytes), ("sync_dir", path), ("rename", from,
    to), ("mkdir", path), ("unlink", path), ("rmdir", path), ("note", text). Paths are relative to root.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.operations: list[Operation] = []
        self._real = {name: getattr(os, name) for name in WATCHED}
        self._open = builtins.open

    def note(self, text: str) -> None:
        self.operations.append(("note", text))

    def __enter__(self) -> Recorder:
        for name in WATCHED:
            setattr(os, name, getattr(self, f"_{name}") if name != "open" else self._os_open)
        builtins.open = self._builtin_open  # type: ignore[assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        builtins.open = self._open

    def _path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Relative to root; None where it lies elsewhere."""
        base = Path(os.readlink(f"/proc/self/fd/{dir_fd}")) if dir_fd is not None else Path.cwd()
        whole = base / os.fspath(path) if not isinstance(path, int) else Path(os.readlink(f"/proc/self/fd/{path}"))
        return str(whole.relative_to(self.root)) if whole.is_relative_to(self.root) else None

    def _say(self, *operation: Any) -> None:
        if None not in operation:
            self.operations.append(operation)

    def _builtin_open(self, path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        opened = self._open(path, mode, *more, **options)
        if not isinstance(path, int) and set(mode) & set("wxa"):
            self._say("create", self._path(path))
        return opened

    def _os_open(self, path: Any, flags: int, *more: Any, **options: Any) -> int:
        descriptor = int(self._real["open"](path, flags, *more, **options))
        if flags & os.O_CREAT:
            self._say("create", self._path(descriptor))
        return descriptor

    def _fsync(self, descriptor: int) -> None:
        self._real["fsync"](descriptor)
        path = self._path(descriptor)
        if path is None:
            return
        whole = self.root / path
        if whole.is_dir():
            self._say("sync_dir", path)
        else:
            with self._open(whole, "rb") as file:
                self._say("sync", path, file.read())

    def _rename(self, source: Any, target: Any, **options: Any) -> None:
        self._real["rename"](source, target, **options)
        self._say("rename", self._path(source), self._path(target))

    _replace = _rename

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        self._say("mkdir", self._path(path, dir_fd))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._real["unlink"](path, dir_fd=dir_fd)
        self._say("unlink", self._path(path, dir_fd))

    _remove = _unlink

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._real["rmdir"](path, dir_fd=dir_fd)
        self._say("rmdir", self._path(path, dir_fd))


@dataclass(eq=False)
class _File:
    durable: bytes = b""
    synced: bool = False


@dataclass(eq=False)
class _Directory:
    """now: names as the program sees them; durable: as of the last fsync; pending: what happened since."""

    now: dict[str, Any] = field(default_factory=dict)
    durable: dict[str, Any] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)


@dataclass(eq=False)
class _Change:
    """Names that one operation sets (a node) or takes away (None), in one or two directories."""

    names: list[tuple[_Directory, str, Any]]


class _Disk:
    def __init__(self) -> None:
        self.root = _Directory()

    def find(self, path: str) -> tuple[_Directory, str]:
        *parents, name = Path(path).parts
        directory = self.root
        for parent in parents:
            directory = directory.now[parent]
        return directory, name

    def node(self, path: str) -> Any:
        if path == ".":
            return self.root
        directory, name = self.find(path)
        return directory.now[name]

    def change(self, *names: tuple[_Directory, str, Any]) -> None:
        change = _Change(list(names))
        for directory, name, node in names:
            if node is None:
                directory.now.pop(name, None)
            else:
                directory.now[name] = node
        for directory in {id(directory): directory for directory, _, _ in names}.values():
            directory.pending.append(change)

    def apply(self, operation: Operation) -> None:
        kind, *parts = operation
        if kind == "note":
            return
        if kind == "sync_dir":
            directory = self.node(parts[0])
            for change in directory.pending:
                _settle(change)
            return
        if kind == "rename":
            (source, old), (target, new) = self.find(parts[0]), self.find(parts[1])
            self.change((source, old, None), (target, new, source.now[old]))
            return
        directory, name = self.find(parts[0])
        if kind == "create" and name not in directory.now:
            self.change((directory, name, _File()))
        elif kind == "create":
            directory.now[name].synced = False
        elif kind == "mkdir":
            self.change((directory, name, _Directory()))
        elif kind == "sync":
            directory.now[name].durable, directory.now[name].synced = parts[1], True
        elif kind in ("unlink", "rmdir"):
            self.change((directory, name, None))


def _settle(change: _Change) -> None:
    """The change is durable, in all its directories: a rename is one operation of the journal."""
    for directory, name, node in change.names:
        if node is None:
            directory.durable.pop(name, None)
        else:
            directory.durable[name] = node
    for directory in {id(directory): directory for directory, _, _ in change.names}.values():
        directory.pending = [other for other in directory.pending if other is not change]


def crash(operations: list[Operation], rng: random.Random, into: Path, *, likely: float) -> None:
    """Write below `into` one state that the power may have left. likely: chance of each operation not yet durable."""
    disk = _Disk()
    for operation in operations:
        disk.apply(operation)
    seen: set[int] = set()

    def settle(directory: _Directory) -> None:
        for change in list(directory.pending):
            if id(change) not in seen:
                seen.add(id(change))
                if rng.random() < likely:
                    _settle(change)
        for node in [*directory.durable.values(), *directory.now.values()]:
            if isinstance(node, _Directory) and id(node) not in seen:
                seen.add(id(node))
                settle(node)

    settle(disk.root)
    _write(disk.root, into, rng, set())


def _write(directory: _Directory, into: Path, rng: random.Random, above: set[int]) -> None:
    into.mkdir(exist_ok=True)
    for name, node in directory.durable.items():
        if isinstance(node, _Directory):
            if id(node) not in above:
                _write(node, into / name, rng, above | {id(node)})
        else:
            data = node.durable
            if not node.synced:
                data = rng.choice([b"", data, data[: len(data) // 2], bytes(len(data) or 100), rng.randbytes(64)])
            (into / name).write_bytes(data)
