"""Parquet decoded in another process, so that no file can take the trainer down.

pyarrow answers damage with an error almost always, but it is C++ that trusts lengths it reads: crafted files have made
it write out of bounds. Files whose hashes are in schema.json are compared before they are decoded (blocks.py) and
need no second process. All others (written by other programs) are decoded by this one child: it may crash, hang, or ask
for more memory than it is allowed, and what comes of it here is a ValueError with the reason, after which a new child
serves the next request. Where no answer comes it is a ReadError: a disk or a mount that hangs looks the same, and rows
are left out of training for damage alone.

Arrow columns come back through memory shared by both (memfd), are copied out of it and fully validated, so that a child
gone astray cannot hand over offsets that point outside their values.

Cost: a process of pyarrow alone (about 60 MB), started at the first request, and one copy of the decoded columns.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from gem_data.remote import ReadError

ANSWER_LIMIT_S = 60.0
MEMORY_LIMIT_BYTES = 8 << 30


class ReaderDiedError(ValueError):
    """The reading process crashed or ran out of memory on this request."""


class _NoAnswerError(Exception):
    """None came within the limit."""


@dataclass(frozen=True, kw_only=True)
class IsolatedFooter:
    """What the footer of a file says, as told by the child."""

    arrow_schema: pa.Schema
    rows: int
    group_rows: tuple[int, ...]
    seconds: tuple[tuple[int, int] | None, ...]
    bytes: int


class ReaderProcess:
    """The child, started when first needed. Any thread may ask; one is served at a time."""

    def __init__(self, *, limit_s: float = ANSWER_LIMIT_S, memory_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self._limit_s, self._memory_bytes = limit_s, memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._memory = -1
        self._finish: weakref.finalize[Any, Any] | None = None
        self.started = 0

    def footer(self, path: Path) -> IsolatedFooter:
        """Schema and row groups. ValueError where the file is no Parquet file, OSError where it cannot be read."""
        answer, table = self._ask({"path": str(path), "group": None, "columns": []})
        return IsolatedFooter(
            arrow_schema=table.schema,
            rows=int(answer["rows"]),
            group_rows=tuple(int(rows) for rows in answer["group_rows"]),
            seconds=tuple(None if found is None else (int(found[0]), int(found[1])) for found in answer["seconds"]),
            bytes=int(answer["size"]),
        )

    def group(self, path: Path, group: int, columns: Sequence[str]) -> pa.Table:
        """Columns of one row group. ValueError where they do not decode, OSError where they cannot be read."""
        return self._ask({"path": str(path), "group": group, "columns": list(columns)})[1]

    def close(self) -> None:
        """End the child. Idempotent; a later request starts another."""
        with self._lock:
            self._stop()

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], pa.Table]:
        with self._lock:
            if self._process is None:
                self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            try:
                process.stdin.write((json.dumps(request) + "\n").encode())
                process.stdin.flush()
                line = self._line(process)
            except (BrokenPipeError, _NoAnswerError):
                line = b""
            if not line.endswith(b"\n"):
                raise self._autopsy(process)
            answer = json.loads(line)
            if "error" in answer:
                text = f"{answer['kind']}: {answer['error']}"
                raise ValueError(text) if answer["errno"] is None else OSError(int(answer["errno"]), text)
            data = _copied(self._memory, int(answer["bytes"]))
        with pa.ipc.open_stream(data) as stream:
            table = stream.read_all()
        table.validate(full=True)
        return answer, table

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        """The answer; _NoAnswerError when none came within the limit."""
        assert process.stdout is not None
        line, deadline = b"", time.monotonic() + self._limit_s
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise _NoAnswerError
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                break
            line += piece
        return line

    def _start(self) -> None:
        self._memory = os.memfd_create("gem_data.reader")
        package = str(Path(__file__).parents[1])
        environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gem_data.reader_process", str(self._memory), str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._memory],
            env=environment,
        )
        self._finish = weakref.finalize(self, _end, self._process, self._memory)
        self.started += 1

    def _autopsy(self, process: subprocess.Popen[bytes]) -> ReaderDiedError | ReadError:
        """How the child ended; it is gone afterwards."""
        try:
            status: int | None = process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            status = None
        self._stop()
        if status is None:
            return ReadError(
                f"the reading process gave no answer within {self._limit_s:g} s and was ended: a disk or mount that "
                "hangs, or a file that hangs the decoder"
            )
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        return ReaderDiedError(f"the reading process died ({how})")

    def _stop(self) -> None:
        if self._finish is not None:
            self._finish()
        self._process, self._finish, self._memory = None, None, -1


@functools.cache
def _reader_of(process_id: int) -> ReaderProcess:
    return ReaderProcess()


def shared_reader() -> ReaderProcess:
    """The reader of this process, with the usual limits; a forked process gets its own."""
    return _reader_of(os.getpid())


def _copied(memory: int, count: int) -> pa.Buffer:
    """The first `count` bytes of the shared memory. One call of the kernel gives less than 2 GiB."""
    held = os.fstat(memory).st_size
    if not 0 <= count <= held:
        raise ValueError(f"the reading process says {count} bytes, and wrote {held}")
    buffer, done = pa.allocate_buffer(count), 0
    view = memoryview(buffer).cast("B")
    while done < count:
        came = os.preadv(memory, [view[done:]], done)
        if not came:
            raise ValueError(f"{done} of {count} bytes came from the reading process")
        done += came
    return buffer


def _end(process: subprocess.Popen[bytes], memory: int) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not yet sent has nowhere to go
                pipe.close()
    os.close(memory)
