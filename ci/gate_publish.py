"""Build asv's pages, and prove that nothing recorded is missing on them.

asv leaves out silently (its issues 171 and 1226): results of a commit that is on no branch it draws, of a benchmark
that is not in benchmarks.json, or of a machine without machine.json. So every value of every result file is looked up
in the graph that the page would draw for it: benchmark, machine parameters, branch, revision. A file of which nothing
is drawn is missing as a whole, whatever the reason: failures alone, or cases that have changed since.

The same for benchmarks/gpu/records/: the measurements there must be asv results, and what has a form of its own, which
asv cannot draw, is named with the reason in records.toml.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from gate_asv import BENCHMARKS, SCRATCH, Workplace, asv, load, result_files

RECORDS = BENCHMARKS / "gpu" / "records"


def publish_pages(results: Path, html: Path, repo: Path, *, records: Path = RECORDS) -> list[str]:
    """Run asv publish; returns a line for every recorded value that the pages do not show."""
    workplace = Workplace(repo=repo.resolve(), results=results.resolve(), html=html.resolve())
    asv(workplace, "publish", "--no-pull", config_folder=SCRATCH / "publish")
    return [*missing_values(results.resolve(), html.resolve()), *missing_records(records, results)]


def missing_values(results: Path, html: Path) -> list[str]:
    """A line for every value of a result file that is no point of a graph below `html`; one for each empty record."""
    index = json.loads((html / "index.json").read_text())
    revisions = {commit: int(revision) for revision, commit in index["revision_to_hash"].items()}
    missing = []
    files = [path for path in sorted(results.rglob("*.json")) if path.parent != results and path.name != "machine.json"]
    for path in files:
        where = f"{path.parent.name}/{path.name}"
        if not (path.parent / "machine.json").exists():
            missing.append(f"{where}: no machine.json beside it, so asv skips the file")
            continue
        result = load(path)
        if result.commit_hash not in revisions:
            missing.append(f"{where}: its commit is not known to the pages")
            continue
        names = sorted(result.get_all_result_keys())
        states = {name: state_of(result, name, index, html, revisions) for name in names}
        faults = [f"{where}: {name}: {s}" for name, s in states.items() if s not in ("drawn", "empty", "outdated")]
        if not faults and "drawn" not in states.values():
            empty = sum(state == "empty" for state in states.values())
            why = f"{empty} failed or skipped, {len(names) - empty} of cases that have changed since"
            faults = [f"{where}: none of its {len(names)} values is drawn ({why})"]
        missing += faults
    return missing if files else ["no result file is recorded"]


def state_of(result: Any, name: str, index: dict[str, Any], html: Path, revisions: dict[str, int]) -> str:
    """One benchmark of a result: "drawn"; rightly not so: "empty" or "outdated"; or why it is not."""
    if name not in index["benchmarks"]:
        return "not in benchmarks.json"
    recorded = result.benchmark_version.get(name)
    if recorded is not None and recorded != index["benchmarks"][name].get("version", recorded):
        return "outdated"  # the case measures something else since (Case.version)
    values = result.get_result_value(name, result.get_result_params(name))
    if all(value is None or (isinstance(value, float) and math.isnan(value)) for value in values):
        return "empty"  # a failure or a skip: there is nothing to draw
    graphs = [graph_path(name, parameters, html) for parameters in matching_graphs(result, index)]
    for path in graphs:
        if path.exists() and revisions[result.commit_hash] in (point[0] for point in json.loads(path.read_text())):
            return "drawn"
    return f"no point at its commit in any of {len(graphs)} graphs (is the commit on a drawn branch?)"


def missing_records(records: Path, results: Path) -> list[str]:
    """A line for every file of GPU records that is neither stored as asv results nor named as a record of its own form;
    for one that lacks a fact, unless it is named as older than the writer of facts; and for every name in records.toml
    that is no such file.
    """
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    from record import FORMAT, lacking

    files = {path.name: json.loads(path.read_text()) for path in sorted(records.glob("*.json"))}
    listed = read_list(records / "records.toml")
    missing = []
    for name, tree in files.items():
        if isinstance(tree, dict) and tree.get("format") == FORMAT:
            missing += unstored(records / name, results)
        elif name not in listed:
            missing.append(f"records/{name}: neither measurements for asv nor named in records.toml with a reason")
            continue
        if listed.get(name) != "before_the_writer" and (lacks := lacking(tree)):
            missing.append(f"records/{name}: lacks {', '.join(lacks)}")
    return [*missing, *(f"records.toml: there is no {name}" for name in sorted(listed.keys() - files.keys()))]


def read_list(path: Path) -> dict[str, str]:
    """File -> its table in records.toml: "own_form", or "before_the_writer", whose facts are what they are."""
    if not path.exists():
        return {}
    tree = tomllib.loads(path.read_text())
    if unknown := tree.keys() - {"own_form", "before_the_writer"}:
        raise ValueError(f"{path}: unknown tables {sorted(unknown)}, expected own_form and before_the_writer")
    for name, reason in ((name, reason) for table in tree.values() for name, reason in table.items()):
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"{path}: {name} has no reason")
    return {name: table for table, entries in tree.items() for name in entries}


def unstored(path: Path, results: Path) -> list[str]:
    """Why a file of measurements is not whole among asv's results; [] when it is. See convert.py for the names."""
    from convert import benchmark_of, machine_name
    from record import read_measurements

    tree = read_measurements(path)
    machine = machine_name(tree["device_before"]["name"])
    commit = re.match(re.escape(machine) + "-([0-9a-f]{8})-", path.name)
    stored: set[str] = set()
    for file in result_files(results) if commit else []:
        if file.parent.name == machine and file.name.startswith(commit.group(1) + "-"):
            stored |= set(load(file).get_all_result_keys())
    wanted = {benchmark_of(measurement)["name"] for measurement in tree["measurements"]}
    return [f"records/{path.name}: {name} is no asv result of its commit" for name in sorted(wanted - stored)]


def matching_graphs(result: Any, index: dict[str, Any]) -> list[dict[str, Any]]:
    """The graph parameters of the page that agree with the result's own, whatever the branch."""
    own = {key: "" if value is None else value for key, value in result.params.items()}
    return [
        parameters
        for parameters in index["graph_param_list"]
        if all((parameters.get(key) or "") == (own.get(key) or "") for key in parameters if key != "branch")
    ]


def graph_path(name: str, parameters: dict[str, Any], html: Path) -> Path:
    """The file the page loads for a benchmark and parameters."""
    from asv.graph import Graph

    return html / (Graph(name, parameters).path + ".json")
