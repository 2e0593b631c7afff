"""Build asv's pages, and prove that nothing recorded is missing on them.

asv leaves out silently (its issues 171 and 1226): results of a commit that is on no branch it draws, of a benchmark
that is not in benchmarks.json, or of a machine without machine.json. So every value of every result file is looked up
in the graph that the page would draw for it: benchmark, machine parameters, branch, revision.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gate_asv import SCRATCH, Workplace, asv, load


def publish_pages(results: Path, html: Path, repo: Path) -> list[str]:
    """Run asv publish; returns a line for every recorded value that the pages do not show."""
    workplace = Workplace(repo=repo.resolve(), results=results.resolve(), html=html.resolve())
    asv(workplace, "publish", "--no-pull", config_folder=SCRATCH / "publish")
    return missing_values(results.resolve(), html.resolve())


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
        for name in sorted(result.get_all_result_keys()):
            missing += [f"{where}: {name}: {why}" for why in faults_of(result, name, index, html, revisions)]
    return missing if files else ["no result file is recorded"]


def faults_of(result: Any, name: str, index: dict[str, Any], html: Path, revisions: dict[str, int]) -> list[str]:
    """Why one benchmark of a result is not drawn in full; [] when it is."""
    if name not in index["benchmarks"]:
        return ["not in benchmarks.json"]
    recorded = result.benchmark_version.get(name)
    if recorded is not None and recorded != index["benchmarks"][name].get("version", recorded):
        return []  # the case measures something else since (Case.version): its old values are rightly not drawn
    values = result.get_result_value(name, result.get_result_params(name))
    if all(value is None or (isinstance(value, float) and math.isnan(value)) for value in values):
        return []  # a failure or a skip: there is nothing to draw
    graphs = [graph_path(name, parameters, html) for parameters in matching_graphs(result, index)]
    for path in graphs:
        if path.exists() and revisions[result.commit_hash] in (point[0] for point in json.loads(path.read_text())):
            return []
    return [f"no point at its commit in any of {len(graphs)} graphs (is the commit on a drawn branch?)"]


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
