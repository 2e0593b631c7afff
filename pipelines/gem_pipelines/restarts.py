"""Automatic restarts that get nowhere: found, named and ended with their own exit code.

    RUN/supervision/attempts.json      one entry per start that did not reach its end: from which step, how far, rows
    RUN/supervision/loop.json          the verdict, for processes that the launcher starts after it

torchrun restarts a failed job without asking why. Each start of a run notes how the one before it ended, from the
records that dead ranks left (flight.py). When `limit` automatic starts in a row began at the same checkpoint and none
wrote a newer one, the next one raises RestartLoopError on every rank: step, data files with row groups and rows, and
sample ids of the step that they died in. A start by hand (`--resume`) is its user's decision and forgets the history.

Cost: a small file a start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gem_pipelines.errors import RunError
from gem_pipelines.flight import ENDED, Flight, read_flights

EXIT_LOOP = 4
_SHOWN_ROWS = 5


class RestartLoopError(RunError):
    """Restarts made no progress; the run is stopped."""

    exit_code = EXIT_LOOP


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A start that ended before its run did. rows: the first [sample_id, file, row group, row] of all ranks."""

    from_step: int
    step: int
    phase: str
    row_count: int
    rows: list[list[int]]
    ranks: list[int]


def note_start(
    directory: Path, *, first_step: int, automatic: bool, limit: int, files: Sequence[str]
) -> tuple[int, str]:
    """Note how the start before this one ended. Returns (number of this start, verdict or "").

    files  names of the data files, which rows are told by

    Called by rank 0, under the run's lock, before the records of this start replace the old ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "attempts.json"
    history: dict[str, Any] = {"starts": 0, "from_step": None, "failed": []}
    if path.is_file():
        try:
            history |= json.loads(path.read_text())
        except ValueError:
            raise RunError(f"{path} is not JSON; remove it to go on") from None
    failed = list(history["failed"]) if automatic else []
    flights = read_flights(directory)
    if history["from_step"] is not None and flights and any(flight.phase != ENDED for flight in flights):
        failed.append(asdict(_summary(flights, from_step=history["from_step"])))
    stuck = []
    for attempt in reversed(failed):
        if attempt["from_step"] != first_step:
            break
        stuck.append(attempt)
    verdict = describe_loop(list(reversed(stuck)), first_step, files) if automatic and len(stuck) >= limit else ""
    number = int(history["starts"])
    _write(path, {"starts": number + 1, "from_step": first_step, "failed": failed[-20:]})
    loop = directory / "loop.json"
    if verdict:
        _write(loop, {"message": verdict})
    else:
        loop.unlink(missing_ok=True)
    return number, verdict


def earlier_verdict(directory: Path) -> str:
    """What an automatic start found before; "" where nothing stands against another one."""
    path = directory / "loop.json"
    if not path.is_file():
        return ""
    try:
        return str(json.loads(path.read_text())["message"])
    except (ValueError, KeyError):
        return ""


def describe_loop(stuck: list[dict[str, Any]], first_step: int, files: Sequence[str]) -> str:
    """The message: where each attempt died, and the rows of the latest one."""
    steps = [attempt["step"] for attempt in stuck]
    last = stuck[-1]
    where = f"step {steps[-1]}" if len(set(steps)) == 1 else "steps " + ", ".join(map(str, steps))
    text = (
        f"{len(stuck)} restarts in a row began at step {first_step} and ended before a newer checkpoint, in {where} "
        f"({last['phase']}): stopped"
    )
    if last["rows"]:
        text += f". The step had {last['row_count']} rows: " + describe_rows(last["rows"], files)
    return text


def describe_rows(rows: list[list[int]], files: Sequence[str]) -> str:
    """ "sample_id 17 (train-00000.parquet, row group 3, row 10), ..." """
    shown = []
    for sample_id, file, group, row in rows[:_SHOWN_ROWS]:
        name = files[file] if 0 <= file < len(files) else f"file {file}"
        shown.append(f"sample_id {sample_id} ({name}, row group {group}, row {row})")
    return ", ".join(shown) + (", ..." if len(rows) > _SHOWN_ROWS else "")


def _summary(flights: list[Flight], *, from_step: int) -> Attempt:
    """The step that the attempt died in: the highest that a rank was in, with the rows of all ranks in it."""
    step = max(flight.step for flight in flights)
    there = [flight for flight in flights if flight.step == step]
    rows = [[int(value) for value in row] for flight in there for row in flight.rows[:1024]]
    return Attempt(
        from_step=from_step,
        step=step,
        phase=there[0].phase,
        row_count=sum(flight.row_count for flight in there),
        rows=rows,
        ranks=[flight.rank for flight in there],
    )


def _write(path: Path, value: Any) -> None:
    from gem_pipelines.rundir import write_text

    write_text(path, json.dumps(value) + "\n")
