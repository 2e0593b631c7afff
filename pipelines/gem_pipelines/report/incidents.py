"""What the report says of what did not go as planned, and of checkpoints: what was lost, why, what saving cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gem_pipelines.report.facts import Table
from gem_pipelines.report.formatting import count, duration, number, plain, quantity
from gem_pipelines.report.run_data import RunData

SHOWN_INCIDENTS = 50
SHOWN_SAMPLES = 5


def incident_table(run: RunData) -> Table | None:
    """Steps left out, steps that stood out, row groups that could not be read, saves that failed; None without any."""
    rows = [row for record in run.incidents for row in _INCIDENTS[record["kind"]](record)]
    rows = _once(rows) + [
        (count(save["step"]), "checkpoint not written", "", str(save["error"]))
        for save in run.saves
        if save.get("error")
    ]
    if not rows:
        return None
    rows.sort(key=lambda row: int(row[0].replace(",", "")))
    hidden = len(rows) - SHOWN_INCIDENTS
    note = f"{hidden:,} more are in metrics.jsonl. " if hidden > 0 else ""
    return Table(
        title="What did not go as planned",
        headers=("step", "what", "samples", "why"),
        rows=tuple(rows[:SHOWN_INCIDENTS]),
        note=note + "A step left out and a row group in quarantine were not trained; a step that stands out was.",
        numeric=frozenset({0}),
    )


def _skip(record: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    yield count(record["step"]), "step left out", _samples(record.get("sample_ids")), str(record.get("reason"))


def _spike(record: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    why = (
        f"{record.get('figure')} {plain(record.get('value'))}, median before {plain(record.get('median'))}, "
        f"{plain(record.get('distance'), 1)} spreads above"
    )
    yield count(record["step"]), "step stands out", _samples(record.get("sample_ids")), why


def _quarantine(record: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for group in _objects(record.get("groups")):
        rows = f"{count(group.get('rows'))} rows"
        yield count(record["step"]), "row group in quarantine", rows, str(group.get("reason"))


_INCIDENTS = {"skip": _skip, "spike": _spike, "quarantine": _quarantine}


def _once(rows: list[tuple[str, str, str, str]]) -> list[tuple[str, str, str, str]]:
    """A resumed run hears again of a row group that it could not read before: the first time counts."""
    seen: dict[tuple[str, ...], tuple[str, str, str, str]] = {}
    for row in rows:
        seen.setdefault(row[1:] if row[1] == "row group in quarantine" else row, row)
    return list(seen.values())


def _samples(ids: Any) -> str:
    if not isinstance(ids, list):
        return ""
    shown = ", ".join(str(sample) for sample in ids[:SHOWN_SAMPLES])
    return f"{len(ids):,}: {shown}" + (", ..." if len(ids) > SHOWN_SAMPLES else "")


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def saves_table(run: RunData) -> Table | None:
    """How many checkpoints, how large, how long they took and how long training stood still for them; None without any
    record of one.
    """
    if not run.saves:
        return None
    written = [save for save in run.saves if not save.get("error")]
    kinds = {name: [s for s in written if bool(s.get("incremental")) == flag] for name, flag in _KINDS.items()}
    stall = sum(_values(run.saves, "stall_seconds"))
    rows = [("written", count(len(written))), ("not written", count(len(run.saves) - len(written)))]
    rows += [(f"size of {name} one, mean", quantity(_mean(of, "bytes"), "B")) for name, of in kinds.items() if of]
    rows += [
        ("beside training", count(sum(bool(save.get("asynchronous")) for save in run.saves))),
        ("time of a save, mean", duration(_mean(written, "seconds"))),
        ("of it hashing, flushing to disk", f"{_share(written, 'hash_seconds')}, {_share(written, 'sync_seconds')}"),
        (
            "training stood still, mean and longest",
            f"{_milliseconds(run.saves, np.mean)}, {_milliseconds(run.saves, max)}",
        ),
        ("of it waiting for the save before", duration(sum(_values(run.saves, "waited_seconds")))),
    ]
    steps = run.train.elapsed_seconds()[-1] if len(run.train.steps) else 0.0
    if steps > 0:
        rows.append(("share of the time of steps", f"{stall / (steps + stall):.2%}"))
    return Table(title="Checkpoints", headers=("what", "value"), rows=tuple(rows))


_KINDS = {"a full": False, "an incremental": True}


def _values(saves: Any, name: str) -> list[float]:
    found = (number(save.get(name)) for save in saves)
    return [value for value in found if np.isfinite(value)]


def _mean(saves: Any, name: str) -> float | None:
    values = _values(saves, name)
    return float(np.mean(values)) if values else None


def _share(saves: Any, name: str) -> str:
    whole = sum(_values(saves, "seconds"))
    return f"{sum(_values(saves, name)) / whole:.1%}" if whole > 0 else "not recorded"


def _milliseconds(saves: Any, over: Any) -> str:
    values = _values(saves, "stall_seconds")
    return f"{1e3 * float(over(values)):.3g} ms" if values else "not recorded"
