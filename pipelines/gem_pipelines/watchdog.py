"""Finding a rank that stands still, and ending all of them with what is needed to understand it.

Every rank has a thread that looks how long the rank has been in its phase (flight.py). Past the limit it

    1. writes its own stacks and its last collectives (torch's flight recorder: number, operation, sizes, state),
    2. the first rank of a machine to get there wakes the others: SIGUSR1, at which a rank writes its stacks from a
       C handler, also while a thread holds the GIL, and SIGCONT, which delivers it to a stopped process,
    3. gathers all of it into RUN/hang/start-N/report.txt, kills the machine's other ranks and exits with code 5.

The limit of a training step is 10 times the 99th percentile of the measured steps, and at least 30 s, or the given one;
before enough steps are measured, and for phases that are no step (start, save, evaluate), it is train.timeout_s. A rank
alone in its job cannot be seen by another one: for the case that its GIL is held, faulthandler's own C thread ends it a
little later, with its stacks.

Where torchrun itself dies, its processes would train on unseen and hold the run's lock: they end, too.

Why from inside: the processes to look at are children of torchrun, which knows nothing of steps; and stacks are only
to be had from the process itself, or by tracing it, which containers forbid.

Cost: a thread that wakes four times a second; per step arming faulthandler's timer, per collective an entry in torch's
recorder (measured: 43 us and 3 us).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from gem_pipelines.flight import ENDED, Flight, FlightRecorder, machine_number, read_flights

EXIT_HANG = 5
MINIMUM_S = 30.0
MEASURED_STEPS = 20
FACTOR = 10.0
STEP = "step"
RECORDED_COLLECTIVES = 2000
SHOWN_COLLECTIVES = 20
_GATHER_SECONDS = 1.0


def record_collectives() -> None:
    """Make torch keep the latest collectives. Before the process group exists, or it has no effect."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))


class StepLimit:
    """The limit of a step: given, or derived from the latest measured ones."""

    def __init__(self, *, given_s: float | None, before_s: float) -> None:
        self._given_s, self._before_s = given_s, before_s
        self._seconds: deque[float] = deque(maxlen=1000)
        self._measured_s: float | None = None
        self._added = 0

    def add(self, seconds: float) -> None:
        """A step took so long. The limit is derived anew every MEASURED_STEPS steps."""
        self._seconds.append(seconds)
        self._added += 1
        if self._added % MEASURED_STEPS == 0:
            ordered = sorted(self._seconds)
            self._measured_s = max(MINIMUM_S, FACTOR * ordered[int(0.99 * (len(ordered) - 1))])

    def seconds(self) -> float:
        """How long a step may take now.

        With 100 steps of which the slowest but one took 4 s: 40 s. With 100 steps of 0.1 s: 30 s.
        """
        if self._given_s is not None:
            return self._given_s
        return self._before_s if self._measured_s is None else self._measured_s


class Watchdog:
    """Watches this rank. `given_s`: train.hang_limit_s; `before_s`: limit where nothing is measured."""

    def __init__(
        self,
        run: Path,
        recorder: FlightRecorder,
        *,
        rank: int,
        attempt: int,
        given_s: float | None,
        before_s: float,
    ) -> None:
        self.flights, self.recorder, self.rank = run / "supervision", recorder, rank
        self.directory = run / "hang" / f"start-{attempt}"
        self._limit = StepLimit(given_s=given_s, before_s=before_s)
        self._before_s = before_s
        self._off = given_s == 0
        self._stop = threading.Event()
        self._signal_file: TextIO | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch. Signals are installed here, so this is for the main thread."""
        if self._off:
            return
        self._signal_file = open(self.flights / f"rank-{self.rank:05d}.stacks", "w")  # noqa: SIM115 - closed in stop()
        faulthandler.register(signal.SIGUSR1, file=self._signal_file, all_threads=True, chain=False)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, phase: str, *, step: int) -> None:
        """This rank begins `phase`; leaving the step before it, whose time is measured."""
        if self.recorder.phase == STEP:
            self._limit.add((time.monotonic_ns() - self.recorder.since_ns) / 1e9)
        self.recorder.enter(phase, step=step)
        self._arm()

    def count_anew(self) -> None:
        """The limit of the phase that this rank is in counts from now."""
        self.recorder.count_anew()
        self._arm()

    def _arm(self) -> None:
        if self._thread is not None:
            assert self._signal_file is not None
            # The C thread of faulthandler is for the case that this process's Python threads cannot run at all.
            faulthandler.dump_traceback_later(self.limit_s() + 2 * _GATHER_SECONDS, exit=True, file=self._signal_file)

    def limit_s(self) -> float:
        """Limit of the phase that this rank is in."""
        return self._limit.seconds() if self.recorder.phase == STEP else self._before_s

    def stop(self) -> None:
        """Watch no longer."""
        if self._thread is None:
            return
        self._stop.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR1)
        assert self._signal_file is not None
        self._signal_file.close()
        self._thread = None

    def _watch(self) -> None:
        while not self._stop.wait(min(0.25, self.limit_s() / 20)):
            waited = (time.monotonic_ns() - self.recorder.since_ns) / 1e9
            if waited > self.limit_s() and self.recorder.phase != ENDED:
                self._end_all(waited)

    def _end_all(self, waited: float) -> None:
        """Does not return."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            others = [f for f in read_flights(self.flights) if self._is_peer(f)]
            states = {flight.rank: process_state(flight.pid) for flight in others}
            self._write_mine(waited)
            with open(self.directory / f"leader-{socket.gethostname()}", "x") as file:
                file.write(f"rank {self.rank}\n")
            self._wake(others)
            report = self._gather(others, states, waited)
            (self.directory / "report.txt").write_text(report)
            sys.stderr.write(report + "\n")
            sys.stderr.flush()
            for flight in others:
                _kill(flight.pid, signal.SIGKILL)
        except FileExistsError:
            time.sleep(2 * _GATHER_SECONDS)  # another rank of this machine is gathering, and ends this one
        finally:
            os._exit(EXIT_HANG)

    def _is_peer(self, flight: Flight) -> bool:
        mine = flight.machine == machine_number() and flight.rank != self.rank and flight.phase != ENDED
        return mine and process_state(flight.pid) not in ("", "Z")

    def _write_mine(self, waited: float) -> None:
        with open(self._file("stacks"), "w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
        about = {
            "rank": self.rank,
            "pid": os.getpid(),
            "phase": self.recorder.phase,
            "step": self.recorder.step,
            "waited_s": waited,
            "limit_s": self.limit_s(),
            "collectives": last_collectives(),
        }
        temporary = self._file("json.tmp")
        temporary.write_text(json.dumps(about, indent=1))
        os.replace(temporary, self._file("json"))

    def _file(self, kind: str) -> Path:
        return self.directory / f"rank-{self.rank:05d}.{kind}"

    def _wake(self, others: list[Flight]) -> None:
        for flight in others:
            _kill(flight.pid, signal.SIGUSR1)
            _kill(flight.pid, signal.SIGCONT)

    def _gather(self, others: list[Flight], states: dict[int, str], waited: float) -> str:
        """The report, when all ranks of this machine have told what they can, or _GATHER_SECONDS later."""
        deadline = time.monotonic() + _GATHER_SECONDS
        while time.monotonic() < deadline and not all(self._told(flight.rank) for flight in others):
            time.sleep(0.02)
        lines = [
            f"HANG: rank {self.rank} has been in {self.recorder.phase} {self.recorder.step} for {waited:.1f} s, "
            f"the limit is {self.limit_s():.1f} s; all ranks of {socket.gethostname()} end. {self.directory}"
        ]
        states[self.rank] = "S"
        for flight in sorted([*others, *(f for f in read_flights(self.flights) if f.rank == self.rank)], key=_rank):
            lines += self._describe(flight, states[flight.rank])
        return "\n".join(lines)

    def _told(self, rank: int) -> bool:
        return (self.directory / f"rank-{rank:05d}.json").exists() and bool(self._stacks(rank))

    def _stacks(self, rank: int) -> str:
        """What its signal handler wrote, of the moment when it was woken; or else, of later, what it wrote itself."""
        for path in (self.flights / f"rank-{rank:05d}.stacks", self.directory / f"rank-{rank:05d}.stacks"):
            with contextlib.suppress(OSError):
                text = path.read_text()
                if text:
                    return text
        return ""

    def _describe(self, flight: Flight, state: str) -> list[str]:
        shown = {"T": " STOPPED (SIGSTOP)", "t": " STOPPED (traced)", "D": " waiting for the kernel"}.get(state, "")
        where = f"in {flight.phase} {flight.step} for {flight.seconds():.1f} s"
        lines = [f"\nrank {flight.rank}: pid {flight.pid},{shown} {where}"]
        path = self.directory / f"rank-{flight.rank:05d}.json"
        if path.exists():
            collectives = json.loads(path.read_text())["collectives"]
            lines += ["  last collectives:", *(f"    {line}" for line in collectives)]
        else:
            lines.append("  last collectives: not told, its Python threads do not run")
        lines += ["  stacks:", *(f"    {line}" for line in (self._stacks(flight.rank) or "not told").splitlines())]
        return lines


def last_collectives() -> list[str]:
    """The latest collectives of this process, oldest first: "#12 all_reduce [[33]] float of default_pg, scheduled".

    torch keeps those of NCCL and those of other backends in two recorders.
    """
    import torch

    native = torch._C._distributed_c10d
    dumps = [
        getattr(native, name) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(native, name)
    ]
    if not dumps:
        return ["torch's recorder of collectives is not available"]
    entries: list[dict[str, Any]] = []
    try:
        for dump in dumps:
            entries += json.loads(dump()).get("entries", ())
        entries.sort(key=lambda entry: int(entry.get("time_created_ns", 0)))
        return [_entry(entry) for entry in entries[-SHOWN_COLLECTIVES:]]
    except (ValueError, KeyError, TypeError) as error:
        return [f"torch's recorder of collectives cannot be read: {type(error).__name__}: {error}"]


def _entry(entry: dict[str, Any]) -> str:
    name = str(entry["profiling_name"]).partition(":")[2] or entry["profiling_name"]
    types = ", ".join(sorted({str(kind).lower() for kind in entry["input_dtypes"]}))
    done = "done" if entry["retired"] else str(entry["state"])
    group = entry["process_group"][1] or entry["process_group"][0]
    return f"#{entry['collective_seq_id']} {name} {entry['input_sizes']} {types} of {group}, {done}"


def process_state(pid: int) -> str:
    """The kernel's letter for a process: R, S, D, T (stopped), Z (dead); "" where there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _rank(flight: Flight) -> int:
    return flight.rank
