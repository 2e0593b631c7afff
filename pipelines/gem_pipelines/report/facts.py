"""The tables of the report. HTML and Markdown show the same `Table` objects, so they cannot disagree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from gem_pipelines.report.formatting import UNDEFINED, UNKNOWN, count, duration, flatten, number, plain, quantity
from gem_pipelines.report.run_data import WARM_UP_STEPS, RunData


@dataclass(frozen=True, kw_only=True)
class Table:
    """A titled table of text. `numeric` columns (by index) are right-aligned; `folded` tables start closed in HTML."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numeric: frozenset[int] = frozenset()
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a method without the model reaches; NaN where undefined. `task` is None if the run did not say."""

    name: str
    ne: float
    auc: float
    task: str | None


@dataclass(frozen=True, kw_only=True)
class LengthSummary:
    """Quantiles of the lengths of one stream: `share` (Q,) in [0, 1] ascending, `length` (Q,)."""

    name: str
    share: np.ndarray
    length: np.ndarray


def floors(run: RunData) -> tuple[Floor, ...]:
    """Floors from the end record and, last, the best possible NE of every task for which it is known."""
    found = []
    if run.end is not None:
        found = [
            Floor(name=f"floor: {name}", ne=number(v.get("ne")), auc=number(v.get("auc")), task=v.get("task"))
            for name, v in run.end["floors"].items()
        ]
    found += [Floor(name="best possible", ne=ne, auc=math.nan, task=task) for task, ne in best_possible(run).items()]
    return tuple(found)


def best_possible(run: RunData) -> dict[str, float]:
    """Task -> the NE of the planted truth, where the data set knows it.

    Data that knows it says so in its facts, for every task; the end record repeats it for the first task.
    """
    data = run.start.get("data")
    facts = data.get("facts") if isinstance(data, dict) else None
    known = facts.get("best_ne") if isinstance(facts, dict) else None
    found = {task: number(ne) for task, ne in known.items()} if isinstance(known, dict) else {}
    stated = number(run.end.get("best_ne")) if run.end is not None else math.nan
    if math.isfinite(stated) and run.tasks:
        found[run.tasks[0]] = stated
    return {task: ne for task, ne in found.items() if math.isfinite(ne)}


def all_tables(run: RunData) -> tuple[Table, ...]:
    """Every table that this run can fill, in reading order."""
    tables = [
        run_table(run),
        result_table(run),
        history_table(run),
        data_table(run),
        throughput_table(run),
        parts_table(run),
        policies_table(run),
        settings_table("Where the tables lie", run.start.get("table_placement")),
        settings_table("Configuration", run.config),
        settings_table("Versions and machine", run.versions),
        settings_table("Everything known of the data", run.start.get("data")),
    ]
    return tuple(table for table in tables if table is not None)


def recipe_name(run: RunData) -> str:
    """The recipe's name, from the resolved config; "unknown recipe" if it has none."""
    config = run.config or run.start.get("config") or {}
    name = config.get("name")
    return name if isinstance(name, str) and name else "unknown recipe"


def status(run: RunData) -> str:
    """One or two words: what became of the run."""
    if run.end is None:
        return "not finished"
    return str(run.end.get("status", "finished"))


def command_note(run: RunData) -> str:
    """How to read the commands of a run that was resumed; empty for another."""
    if len(run.starts) < 2:
        return ""
    return "The run was resumed: each line went on from the last, with the run directory of the one before."


def run_table(run: RunData) -> Table:
    """What was trained, on what, for how long."""
    start, train = run.start, run.train
    parameters = start.get("parameters") if isinstance(start.get("parameters"), dict) else {}
    config = run.config or {}
    data = config.get("data") if isinstance(config.get("data"), dict) else {}
    again = run.starts[1:]
    rows = [
        ("recipe", recipe_name(run)),
        ("status", status(run)),
        ("data", str(data.get("source", UNKNOWN))),
        ("started", str((run.starts[0] if run.starts else {}).get("time", UNKNOWN))),
        *([("resumed", "; ".join(map(_resumption, again)))] if again else []),
        ("steps trained", count(run.last_step) if len(train.steps) else "0"),
        ("samples seen", count(_last(train.column("samples")))),
        ("events (tokens) seen", count(_last(train.column("tokens")))),
        ("dense parameters", count(parameters.get("dense"))),
        ("table parameters", count(parameters.get("tables"))),
        ("processes", count(start.get("world_size"))),
        ("time of training steps", duration(train.elapsed_seconds()[-1] if len(train.steps) else None)),
        # The end record knows of its own process only.
        (
            "time since it was last resumed" if again else "time of the whole run",
            duration(run.end.get("seconds") if run.end else None),
        ),
    ]
    return Table(title="Run", headers=("what", "value"), rows=tuple(rows))


def _resumption(start: dict[str, Any]) -> str:
    return f"from step {count(start.get('resumed_from'))} at {start.get('time', UNKNOWN)}"


def _last(values: np.ndarray) -> float:
    good = values[np.isfinite(values)]
    return float(good[-1]) if len(good) else math.nan


def result_table(run: RunData) -> Table | None:
    """Metrics of the last evaluation by task, with floors and the best possible NE below."""
    if not run.evals:
        return None
    last = run.evals[-1]
    rows = []
    for task, values in last["tasks"].items():
        digits = [plain(values.get(name)) for name in ("ne", "auc", "gauc", "calibration", "log_loss", "rate")]
        rows.append((f"model: {task}", *digits, count(values.get("count"))))
    for floor in floors(run):
        name = f"{floor.name} ({floor.task})" if floor.task else floor.name
        rows.append((name, plain(floor.ne), plain(floor.auc) if math.isfinite(floor.auc) else "", "", "", "", "", ""))
    note = (
        "NE, log loss: lower is better. AUC, GAUC: higher is better. Calibration: sum of predictions over sum of "
        f"labels, best at 1. {UNDEFINED}: the metric has no value on this data (for example AUC with one class)."
    )
    if not floors(run):
        note += " The run recorded no floors."
    return Table(
        title=f"Result at step {last['step']:,}",
        headers=("", "NE", "AUC", "GAUC", "calibration", "log loss", "rate", "rows"),
        rows=tuple(rows),
        note=note,
        numeric=frozenset(range(1, 8)),
    )


def history_table(run: RunData, limit: int = 12) -> Table | None:
    """The evaluations over steps, if there were several; evenly chosen where there are many."""
    if len(run.evals) < 2:
        return None
    chosen = sorted({round(i) for i in np.linspace(0, len(run.evals) - 1, limit)})
    rows = []
    for index in chosen:
        record = run.evals[index]
        for task, values in record["tasks"].items():
            digits = (plain(values.get(name)) for name in ("ne", "auc", "gauc", "calibration"))
            rows.append((count(record["step"]), task, *digits))
    note = f"{len(chosen)} of {len(run.evals)} evaluations." if len(chosen) < len(run.evals) else ""
    headers = ("step", "task", "NE", "AUC", "GAUC", "calibration")
    return Table(
        title="Evaluations",
        headers=headers,
        rows=tuple(rows),
        note=note,
        numeric=frozenset({0, 2, 3, 4, 5}),
        folded=True,
    )


def throughput_table(run: RunData) -> Table | None:
    """Rates of the whole run and of its median step, from the train records of all its processes."""
    train = run.train
    if not len(train.steps):
        return None
    units = (("samples_per_s", "samples/s"), ("tokens_per_s", "tokens/s"), ("flops_per_s", "FLOP/s"))
    rows: list[tuple[str, ...]] = []
    for name, unit in units:
        rows.append((unit, quantity(train.rate(name)), quantity(_median(train.steady_column(name)))))
    mfu = (train.rate("mfu"), _median(train.steady_column("mfu")))
    rows.append(("MFU", *(f"{value:.2%}" if math.isfinite(value) else UNDEFINED for value in mfu)))
    seconds = train.steady_column("seconds")
    rows.append(("step time", _milliseconds(_mean(seconds)), _milliseconds(_median(seconds))))
    memory = train.column("memory_bytes")
    if np.isfinite(memory).any():
        rows.append(("largest memory", f"{np.nanmax(memory) / 2**20:,.0f} MiB", ""))
    note = warm_up_note(run)
    note += f" {peak_note(run) or 'No peak FLOP/s was measured or given, so MFU is undefined.'}"
    note += " FLOPs are forward and backward, from real lengths and masks."
    return Table(
        title="Throughput",
        headers=("", "whole run", "median step"),
        rows=tuple(rows),
        note=note,
        numeric=frozenset({1, 2}),
    )


def warm_up_note(run: RunData) -> str:
    """Which steps the figures of time are of."""
    starts = max(1, len(run.starts))
    if not (run.train.process_step > WARM_UP_STEPS).any():
        return "All recorded steps."
    if starts == 1:
        return f"All recorded steps but the first {WARM_UP_STEPS}."
    return f"All recorded steps of {starts} starts, but for the first {WARM_UP_STEPS} after each."


def peak_note(run: RunData) -> str:
    """What MFU is against; empty where that is not known. A resumed run can have a peak for every start."""
    starts = [start for start in run.starts if math.isfinite(number(start.get("peak_flops_per_s")))]
    if not starts:
        return ""
    peaks = dict.fromkeys(quantity(start.get("peak_flops_per_s"), "FLOP/s") for start in starts)
    sources = dict.fromkeys(str(start.get("peak_source", "source unknown")) for start in starts)
    every = ", at every start its own" if len(peaks) > 1 else ""
    return f"MFU is against a peak of {' and '.join(peaks)} ({', '.join(sources)}{every})."


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if math.isfinite(seconds) else UNKNOWN


def parts_table(run: RunData) -> Table | None:
    """Mean time and FLOPs of a step by part."""
    seconds, profiled = run.train.step_means("seconds_by_part", steady=True)
    flops, _ = run.train.step_means("flops_by_part", steady=False)
    if not seconds and not flops:
        return None
    all_seconds, all_flops = sum(seconds.values()), sum(flops.values())
    rows = []
    for name in dict.fromkeys([*seconds, *flops]):
        time, work = number(seconds.get(name)), number(flops.get(name))
        rows.append(
            (
                name,
                _milliseconds(time) if name in seconds else "",
                f"{time / all_seconds:.1%}" if name in seconds and all_seconds > 0 else "",
                quantity(work) if name in flops else "",
                f"{work / all_flops:.1%}" if name in flops and all_flops > 0 else "",
            )
        )
    return Table(
        title="Time and FLOPs by part of a step",
        headers=("part", "time", "share of time", "FLOPs", "share of FLOPs"),
        rows=tuple(rows),
        note=f"Time: mean of the {profiled:,} profiled steps (those of the warm-up only if there are no others). "
        "FLOPs: mean of all steps.",
        numeric=frozenset({1, 2, 3, 4}),
    )


def policies_table(run: RunData) -> Table | None:
    """Ids outside their tables, by feature with a policy, as the last record counts them; for ids that earn their rows
    (zch) those without one, and how many of the table were inserted and evicted.
    """
    seen, outside = run.train.group("ids_seen"), run.train.group("ids_outside")
    if not seen:
        return None
    given = ((run.config or run.start.get("config") or {}).get("tables") or {}).get("policies") or []
    policy_of = dict(text.split("=", 1) for text in given)
    rounds = [run.train.group(f"ids_{kind}") for kind in ("inserted", "evicted")]
    rows = []
    for name, values in seen.items():
        total, strange = float(values[-1]), float(outside[name][-1])
        share = f"{strange / total:.3%}" if total > 0 else ""
        own = tuple(count(float(found[name][-1])) if name in found else "" for found in rounds)
        rows.append((name, policy_of.get(name, UNKNOWN), count(total), count(strange), share, *own))
    headers: tuple[str, ...] = ("feature", "policy", "ids", "outside", "share", "inserted", "evicted")
    if not any(rounds):
        headers, rows = headers[:5], [row[:5] for row in rows]
    return Table(
        title="Ids outside their tables",
        headers=headers,
        rows=tuple(rows),
        note="Of training and evaluation, over all processes, since the last start of the run.",
        numeric=frozenset(range(2, len(headers))),
    )


def settings_table(title: str, settings: Any) -> Table | None:
    """Nested JSON as dotted keys and values."""
    if not isinstance(settings, dict) or not settings:
        return None
    rows = tuple((key, _setting(value)) for key, value in flatten(settings))
    return Table(title=title, headers=("key", "value"), rows=rows, folded=True)


def _setting(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(_setting(inner) for inner in value) or "(empty)"
    if isinstance(value, dict):
        return "(empty)"
    return str(value)


def _splits(run: RunData) -> dict[str, dict[str, Any]]:
    data = run.start.get("data")
    splits = data.get("splits") if isinstance(data, dict) else None
    return {name: split for name, split in (splits or {}).items() if isinstance(split, dict)}


def data_table(run: RunData) -> Table | None:
    """Rows, users, time span, label rates and stream lengths of each split, as inspected at the start."""
    splits = _splits(run)
    if not splits:
        return None
    columns = [_split_facts(split) for split in splits.values()]
    rows = [
        (what, *(facts.get(what, "") for facts in columns)) for what in dict.fromkeys(k for c in columns for k in c)
    ]
    name = run.start["data"].get("name")
    return Table(
        title=f"Data: {name}" if name else "Data",
        headers=("", *splits),
        rows=tuple(rows),
        numeric=frozenset(range(1, len(splits) + 1)),
        note="Lengths are those of the files; a run may read fewer events of a stream (data.max_length).",
    )


def _split_facts(split: dict[str, Any]) -> dict[str, str]:
    """What to show of one split, line by line."""
    time = split.get("time") or {}
    facts = {
        "rows": count(split.get("rows")),
        "users": count(split.get("users")),
        "first row": moment(time.get("first")),
        "last row": moment(time.get("last")),
    }
    for label in split.get("labels") or {}:
        facts[f"rate of label {label}"] = plain(_inner(split, "labels", label, "rate"))
    for stream in split.get("streams") or {}:
        longest = (_inner(split, "streams", stream, "quantiles") or {}).get("1")
        facts[f"events of {stream}"] = count(_inner(split, "streams", stream, "total"))
        facts[f"length of {stream}: mean, longest"] = (
            f"{plain(_inner(split, 'streams', stream, 'mean'), 1)}, {count(longest)}"
        )
    facts["files"] = count(split.get("files"))
    facts["size"] = quantity(split.get("bytes"), "B")
    return facts


def _inner(split: dict[str, Any], group: str, name: str, figure: str) -> Any:
    return ((split.get(group) or {}).get(name) or {}).get(figure)


def moment(seconds: Any) -> str:
    """A time stamp as a date in UTC; where it is none, as it is."""
    value = number(seconds)
    if not math.isfinite(value):
        return UNKNOWN
    try:
        return datetime.fromtimestamp(value, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{value:,.0f} s"


def length_summaries(run: RunData) -> tuple[LengthSummary, ...]:
    """Length quantiles of every stream of the training split, from the data summary of the start record."""
    found = []
    for name in _splits(run).get("train", {}).get("streams") or {}:
        quantiles = _inner(_splits(run)["train"], "streams", name, "quantiles") or {}
        pairs = sorted((float(share), number(length)) for share, length in quantiles.items())
        if pairs:
            shares, lengths = np.array(pairs).T
            found.append(LengthSummary(name=name, share=shares, length=lengths))
    return tuple(found)
