"""What each rank is doing right now, in a small mapped file that survives the death of the rank.

    RUN/supervision/rank-00003.flight     one per rank: process, attempt, step, phase, since when, rows of the step

A mapped file needs no call to the system to be up to date: what was stored before SIGKILL is read after it. The time is
the monotonic clock, which all processes of a machine share, so that another rank's standstill can be measured. Not
flushed to disk: it is about dead processes, not about dead machines.

Cost: storing 512 rows takes some microseconds a step; CAPACITY rows of 32 bytes each per rank.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from gem_pipelines.runlock import machine_id

CAPACITY = 4096
ENDED = "ended"
_MAGIC = b"gemfly01"
# magic, machine, pid, attempt, step, since (monotonic ns), rows in all, phase
_HEADER = struct.Struct("<8sqqqqqq16s")
_BYTES = _HEADER.size + 32 * CAPACITY


@dataclass(frozen=True, kw_only=True)
class Flight:
    """One rank's record. rows: up to CAPACITY of (sample_id, file, row group, row); row_count: of the whole step."""

    rank: int
    machine: int
    pid: int
    attempt: int
    step: int
    phase: str
    since_ns: int
    row_count: int
    rows: np.ndarray

    def seconds(self) -> float:
        """How long the rank has been in this phase, on the machine that wrote the record."""
        return (time.monotonic_ns() - self.since_ns) / 1e9


class FlightRecorder:
    """Writes this rank's record. `attempt`: number of this start of the run, from 0."""

    def __init__(self, directory: Path, *, rank: int, attempt: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"rank-{rank:05d}.flight"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, _BYTES)
        self._map = mmap.mmap(descriptor, _BYTES)
        os.close(descriptor)
        self._rows = np.frombuffer(self._map, dtype=np.int64, count=4 * CAPACITY, offset=_HEADER.size)
        self._machine, self._attempt = machine_number(), attempt
        self.phase, self.step, self.since_ns = "start", 0, time.monotonic_ns()
        self.enter("start", step=0)

    def enter(self, phase: str, *, step: int) -> None:
        """This rank begins `phase` of `step`, and has no rows yet."""
        self.phase, self.step, self.since_ns = phase, step, time.monotonic_ns()
        self._write(0)

    def count_anew(self) -> None:
        """This rank stays in its phase, with its rows, but for no time yet."""
        self.since_ns = time.monotonic_ns()
        self._write(self._row_count)

    def rows(self, sample_ids: Tensor, row_index: Tensor) -> None:
        """The rows of the step: (B,) and (B, 3) int64 on the CPU."""
        count = int(sample_ids.shape[0])
        kept = min(count, CAPACITY)
        table = self._rows[: 4 * kept].reshape(kept, 4)
        table[:, 0] = sample_ids[:kept].numpy()
        table[:, 1:] = row_index[:kept].numpy()
        self._write(count)

    def _write(self, rows: int) -> None:
        self._row_count, phase = rows, self.phase.encode()
        _HEADER.pack_into(
            self._map, 0, _MAGIC, self._machine, os.getpid(), self._attempt, self.step, self.since_ns, rows, phase
        )


def machine_number() -> int:
    """machine_id() as 63 bits."""
    return int.from_bytes(hashlib.blake2b(machine_id().encode(), digest_size=8).digest(), "big") >> 1


def read_flights(directory: Path) -> list[Flight]:
    """The records of all ranks, by rank; files that are no records are left out."""
    found = []
    for path in sorted(directory.glob("rank-*.flight")):
        match = re.fullmatch(r"rank-(\d{5,})\.flight", path.name)
        data = path.read_bytes() if match and path.is_file() and not path.is_symlink() else b""
        if match and len(data) == _BYTES and data[:8] == _MAGIC:
            found.append(_decode(int(match.group(1)), data))
    return found


def _decode(rank: int, data: bytes) -> Flight:
    _, machine, pid, attempt, step, since_ns, count, phase = _HEADER.unpack_from(data)
    kept = max(0, min(count, CAPACITY))
    rows = np.frombuffer(data, dtype=np.int64, count=4 * kept, offset=_HEADER.size).reshape(kept, 4)
    return Flight(
        rank=rank,
        machine=machine,
        pid=pid,
        attempt=attempt,
        step=step,
        phase=phase.rstrip(b"\0").decode(errors="replace"),
        since_ns=since_ns,
        row_count=count,
        rows=rows,
    )


def clear_flights(directory: Path) -> None:
    """Forget the records of an earlier attempt: its world may have been larger."""
    for path in directory.glob("rank-*.flight"):
        path.unlink(missing_ok=True)
