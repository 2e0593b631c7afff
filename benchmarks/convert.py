"""Store measurements of a GPU host as asv results of a machine with that GPU's name.

    python benchmarks/convert.py OUT/*.json [--commit COMMIT] [--results benchmarks/results]

asv cannot run on a host without network (it builds environments), so the host writes files of measurements (record.py)
and here they join the history: results/<gpu>/<commit>-<environment>.json, the list of benchmarks, and the raw files
with clocks, power cap and throttle reasons in benchmarks/gpu/records/. Then `nox -s publish` draws them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import UNITS, Measurement, lacking, read_measurements

HERE = Path(__file__).resolve().parent


def machine_name(gpu: str) -> str:
    """ "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def machine_of(tree: dict[str, Any]) -> dict[str, str]:
    """asv's description of the host, the GPU in it; a file from a host without a GPU, or one not told, is refused."""
    device = tree["device_before"]
    if device["name"] == "none":
        raise ValueError("measured on a host without a GPU: asv itself measures those (python ci/gate.py record)")
    if device["name"].startswith("unknown"):
        raise ValueError(f"the GPU is {device['name']}: a number without clocks and power cap cannot be compared")
    cap = device["power_cap_w"]
    return {
        "machine": machine_name(device["name"]),
        "gpu": device["name"],
        "gpu_power_cap_w": "unknown" if cap is None else f"{cap:.0f}",
        "os": tree["host"]["os"],
        "arch": tree["host"]["arch"],
        "num_cpu": tree["host"]["num_cpu"],
        "cpu": "",
        "ram": "",
    }


def commit_of(tree: dict[str, Any], given: str | None) -> tuple[str, int]:
    """(hash, date in ms) of the measured commit, which this repository must have.

    `given` is for files that name none; another than the file's, and a tree that was not as committed, are refused.
    """
    if tree.get("dirty"):
        raise ValueError(
            f"measured on a tree with uncommitted changes to {tree['commit']}: commit them and measure again"
        )
    if not (given or tree["commit"]):
        raise ValueError("the file names no commit: pass --commit")
    found = [resolve(name) for name in (tree["commit"], given) if name]
    if found[0] != found[-1]:
        raise ValueError(f"--commit {given} is not the commit that was measured, {tree['commit']}: leave it out")
    return found[0]


def resolve(name: str) -> tuple[str, int]:
    """(hash, date in ms) of a commit of this repository."""
    command = ["git", "show", "--no-patch", "--format=%H %ct", f"{name}^{{commit}}"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"commit {name!r} is not in this repository: {done.stderr.strip()}")
    commit, seconds = done.stdout.split()
    return commit, int(seconds) * 1000


def benchmark_of(measurement: Measurement) -> dict[str, Any]:
    """The entry of benchmarks.json."""
    unit, _ = UNITS[measurement.unit]
    kind = "time" if unit == "seconds" else "track"
    name = f"{measurement.case}.{'time_device' if kind == 'time' else 'track_' + unit}"
    return {
        "name": name,
        "type": kind,
        "unit": unit,
        "params": [],
        "param_names": [],
        "version": "gpu 1",
        "code": measurement.case,
        "timeout": 60,
    }


def convert(path: Path, *, results: Path, records: Path, commit: str | None = None) -> Path:
    """Add one file to the record; returns the asv result file. Results of other cases of that commit stay.

    ValueError, and nothing stored, for a file that lacks a fact without saying why (see lacking() in record.py).
    """
    from asv.results import Results
    from asv.runner import BenchmarkResult

    tree = read_measurements(path)
    machine = machine_of(tree)
    commit_hash, date = commit_of(tree, commit)
    record = json.loads(path.read_text())
    if commit:  # somebody's word for what the file leaves open
        record["commit"] = commit_hash
        if record.get("dirty") is None:
            record["without"] = {**record.get("without", {}), "dirty": "the commit was named when this was stored"}
    if lacks := lacking(record):
        raise ValueError(
            f"{path.name} lacks {', '.join(lacks)}: measure again with benchmarks/record.py's writer, at work and with "
            "GEMLINE_COMMIT set, or let the file say under 'without' why it cannot be had"
        )
    requirements = {name: tree["versions"][name] for name in ("torch", "triton")}
    environment = "gpu-py" + ".".join(tree["versions"]["python"].split(".")[:2])
    result = Results(machine, requirements, commit_hash, date, tree["versions"]["python"], environment, {})
    result.load_data(str(results))
    now = datetime.datetime.now(datetime.UTC)
    for measurement in tree["measurements"]:
        _, factor = UNITS[measurement.unit]
        samples = [sample * factor for sample in measurement.samples]
        timed = measurement.unit == "ms"
        value = BenchmarkResult(
            result=[statistics.median(samples)],
            samples=[samples if timed else None],
            number=[1 if timed else None],
            errcode=0,
            stderr="",
            profile=None,
        )
        result.add_result(benchmark_of(measurement), value, started_at=now, record_samples=True)
    result.save(str(results))
    (results / machine["machine"] / "machine.json").write_text(json.dumps({**machine, "version": 1}, indent=1) + "\n")
    add_benchmarks(results, [benchmark_of(measurement) for measurement in tree["measurements"]])
    records.mkdir(parents=True, exist_ok=True)
    stored = records / f"{machine['machine']}-{commit_hash[:8]}-{path.name}"
    stored.write_text(json.dumps(record, indent=1, allow_nan=False))
    return results / machine["machine"] / f"{commit_hash[:8]}-{environment}.json"


def add_benchmarks(results: Path, entries: list[dict[str, Any]]) -> None:
    """Put entries into benchmarks.json."""
    path = results / "benchmarks.json"
    known = json.loads(path.read_text()) if path.exists() else {"version": 2}
    version = known.pop("version")
    known |= {entry["name"]: entry for entry in entries}
    path.write_text(json.dumps({**dict(sorted(known.items())), "version": version}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--commit", help="the measured commit, where a file does not name it")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--records", type=Path, default=HERE / "gpu" / "records")
    arguments = parser.parse_args()
    try:
        for path in arguments.files:
            print(convert(path, results=arguments.results, records=arguments.records, commit=arguments.commit))
    except ValueError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
