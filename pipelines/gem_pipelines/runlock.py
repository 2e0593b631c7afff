"""One job per run directory: a lock that the kernel drops when its holder dies, and that says who holds it.

    RUN/run.lock     JSON: job id, pid, start of the process, host, machine and boot id; locked with flock

On one machine liveness is the kernel's word: flock ends with the process that took it, whatever killed it, so a lock
left by SIGKILL is free at once and no age is looked at. A forked child closes its copy, so an orphan does not hold the
run. Another machine's lock is seen too where the file system passes flock on; where it does not, the holder's beat is
looked at: the file's time moves every BEAT_SECONDS. Taken over only when it stands still while it is watched AND its
last beat is FOREIGN_DEAD_SECONDS old, both by the file server's clock. A lock counts only while the file of its name
is the one that was locked, so that removing it cannot let two jobs in.

`check_held` before a checkpoint is published finds a lock file that someone removed or replaced meanwhile.

Cost: one thread that sets a file time once a second, on rank 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from gem_pipelines.errors import RunError

BEAT_SECONDS = 1.0
WATCH_SECONDS = 3.0
FOREIGN_DEAD_SECONDS = 60.0


class LockError(RunError):
    """Another job holds the run directory, or this one has lost it."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock. machine: id of the machine and its boot; started: kernel's start time of the process."""

    job: str
    pid: int
    started: str
    host: str
    machine: str
    released: bool = False

    def __str__(self) -> str:
        return f"job {self.job}, pid {self.pid} on host {self.host}"


def this_process() -> Holder:
    """This process, as a new job."""
    return Holder(
        job=uuid.uuid4().hex[:12],
        pid=os.getpid(),
        started=_started(os.getpid()),
        host=socket.gethostname(),
        machine=machine_id(),
    )


def machine_id() -> str:
    """Of this machine since it started; network addresses where the system does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{uuid.getnode():x}"


def _started(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return ""


class RunLock:
    """A held lock; `RunLock.acquire(path)` makes one."""

    def __init__(self, path: Path, descriptor: int, holder: Holder) -> None:
        self.path, self.holder = path, holder
        self._descriptor: int | None = descriptor
        self._stop = threading.Event()
        os.register_at_fork(after_in_child=self._forget)
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, path: Path, *, holder: Holder | None = None) -> RunLock:
        """Lock `path` (made where missing) for this job. Raises LockError that names the holder, within 5 s."""
        holder = holder or this_process()
        for _ in range(3):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                found = _read_patiently(descriptor)
                os.close(descriptor)
                raise LockError(_refusal(path, found)) from None
            if _same_file(path, descriptor):
                break
            os.close(descriptor)  # removed and made anew between open and lock
        else:
            raise LockError(f"{path} is removed and made again all the time: what else writes to this run?")
        before = _read(descriptor)
        if before is not None and not before.released and before.machine != holder.machine:
            try:
                _wait_for_foreign(path, descriptor, before)
            except LockError:
                os.close(descriptor)
                raise
        _write(descriptor, holder)
        return cls(path, descriptor, holder)

    def check_held(self) -> None:
        """Raise LockError where the file is no longer the one that was locked, or names another job."""
        if self._descriptor is None:
            raise LockError(f"{self.path}: this job has given the lock back")
        if not _same_file(self.path, self._descriptor):
            raise LockError(f"{self.path} was removed or replaced while {self.holder} held it; nothing more is written")
        found = _read(self._descriptor)
        if found is None or found.job != self.holder.job:
            raise LockError(f"{self.path} names {found or 'nobody'} now, not {self.holder}; nothing more is written")

    def release(self, *, remove: bool = False) -> None:
        """Give the lock back. remove: and its file, where nothing came of the run; who waits for it makes a new one."""
        if self._descriptor is None:
            return
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            _write(self._descriptor, Holder(**{**asdict(self.holder), "released": True}))
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                assert self._descriptor is not None
                os.utime(self._descriptor)

    def _forget(self) -> None:
        """In a forked child: the lock is the parent's alone."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        named, mine = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def _read(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _read_patiently(descriptor: int) -> Holder | None:
    """The holder may have locked the file a moment ago and not yet written its name."""
    for _ in range(20):
        found = _read(descriptor)
        if found is not None and not found.released:
            return found
        time.sleep(0.05)
    return found


def _write(descriptor: int, holder: Holder) -> None:
    data = json.dumps(asdict(holder)).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))
    os.fsync(descriptor)


def _refusal(path: Path, found: Holder | None) -> str:
    who = "a job that has not yet said its name" if found is None else str(found)
    if found is not None and found.machine == machine_id() and _started(found.pid) != found.started:
        who += " (which has ended, but a process that it left behind still holds the lock: end that one)"
    return f"{path.parent} is in use by {who}: two jobs never write to one run. Wait, or choose another --run-dir"


def _wait_for_foreign(path: Path, descriptor: int, holder: Holder) -> None:
    """Return where the holder on another machine is dead: no beat while watched, and none for long before."""
    first = os.fstat(descriptor).st_mtime_ns
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if os.fstat(descriptor).st_mtime_ns != first:
            raise LockError(_refusal(path, holder))
    age_s = (_server_time_ns(path.parent) - first) / 1e9
    if age_s < FOREIGN_DEAD_SECONDS:
        raise LockError(
            f"{_refusal(path, holder)}. Its machine is another one and its last sign of life is {age_s:.0f} s old: it "
            f"counts as dead after {FOREIGN_DEAD_SECONDS:.0f} s"
        )


def _server_time_ns(directory: Path) -> int:
    """Now, by the clock that stamps the files of `directory`."""
    probe = directory / f".clock-{uuid.uuid4().hex[:8]}"
    probe.touch()
    try:
        return probe.stat().st_mtime_ns
    finally:
        probe.unlink()
