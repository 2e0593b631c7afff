"""asv's pages from recorded results; what asv would leave out silently is found (asv issues 171 and 1226)."""

from __future__ import annotations

import json
import shutil

import gate
import pytest
from convert import convert
from device import DeviceRecord
from gate_asv import RESULTS, git
from gate_publish import RECORDS, missing_records, missing_values, publish_pages
from gate_times import commit
from record import Measurement, write_measurements

GPU = DeviceRecord(name="NVIDIA H200", driver="580.1", sm_clock_mhz=1740, power_cap_w=700.0, throttle_reasons=())


@pytest.fixture
def repo(tmp_path):
    """A repository with three commits on main, the second one tagged, and one on a branch that is gone."""
    path = tmp_path / "repo"
    path.mkdir()
    git("init", "--quiet", "--initial-branch", "main", repo=path)
    (path / "file").write_text("0")
    git("add", "file", repo=path)
    commits = {}
    for name in ("first", "second", "third"):
        (path / "file").write_text(name)
        commits[name] = commit(path, name)
        if name == "second":
            git("tag", "v1", repo=path)
    git("checkout", "--quiet", "-b", "side", repo=path)
    commits["side"] = commit(path, "side", "--allow-empty")
    git("checkout", "--quiet", "main", repo=path)
    return path, commits


@pytest.fixture
def recorded(repo, tmp_path, monkeypatch):
    """results/ with one GPU measurement at each of the named commits."""
    path, commits = repo
    monkeypatch.setattr("convert.HERE", path)
    monkeypatch.setattr("record.HERE", tmp_path)  # no git there, as on a GPU host
    results = tmp_path / "results"

    def add(*names):
        for name in names:
            monkeypatch.setenv("GEMLINE_COMMIT", commits[name] + "-clean")
            file = tmp_path / f"{name}.json"
            found = [
                Measurement(case="attention_gpu.hstu_forward", unit="ms", samples=(2.0, 3.0, 1.0)),
                Measurement(case="attention_gpu.hstu_forward", unit="J", samples=(0.5,)),
            ]
            write_measurements(file, found, ceilings={"copy_bytes_per_s": 4e12}, before=GPU, after=GPU)
            convert(file, results=results, records=tmp_path / "records")
        return results

    return add


def test_a_single_commit_and_a_tag_are_drawn(repo, recorded, tmp_path):
    results = recorded("second")
    assert publish_pages(results, tmp_path / "html", repo[0], records=tmp_path / "records") == []
    graphs = list((tmp_path / "html" / "graphs").rglob("attention_gpu.hstu_forward.time_device.json"))
    points = [json.loads(path.read_text()) for path in graphs if "summary" not in str(path)]
    assert [[point[1] for point in graph] for graph in points] == [[0.002]]


def test_all_commits_of_the_branch_are_drawn(repo, recorded, tmp_path):
    assert (
        publish_pages(recorded("first", "second", "third"), tmp_path / "html", repo[0], records=tmp_path / "records")
        == []
    )


def test_a_commit_off_the_branch_is_missed(repo, recorded, tmp_path, capsys):
    results = recorded("first", "side")
    html = tmp_path / "html"
    command = ["publish", "--results", str(results), "--html", str(html), "--repo", str(repo[0])]
    command += ["--records", str(tmp_path / "records")]
    assert gate.main(command) == 1
    missing = [line for line in capsys.readouterr().out.splitlines() if "no point at its commit" in line]
    assert len(missing) == 2
    assert all(f"nvidia-h200/{repo[1]['side'][:8]}-gpu-py" in line for line in missing)


def test_a_file_the_page_does_not_know_is_missed(repo, recorded, tmp_path):
    """Recorded after the pages were built, without its machine, or not in the list of benchmarks."""
    html = tmp_path / "html"
    results = recorded("first")
    assert publish_pages(results, html, repo[0], records=tmp_path / "records") == []
    recorded("third")
    assert any("commit is not known" in line for line in missing_values(results, html))
    (results / "nvidia-h200" / "machine.json").unlink()
    assert any("no machine.json" in line for line in missing_values(results, html))
    recorded("first")
    names = json.loads((results / "benchmarks.json").read_text())
    del names["attention_gpu.hstu_forward.track_joules"]
    (results / "benchmarks.json").write_text(json.dumps(names))
    missing = publish_pages(results, html, repo[0], records=tmp_path / "records")
    assert len(missing) == 2
    assert all("track_joules: not in benchmarks.json" in line for line in missing)


def test_an_empty_record_is_not_complete(repo, recorded, tmp_path):
    results = recorded("first")
    publish_pages(results, tmp_path / "html", repo[0], records=tmp_path / "records")
    for path in results.glob("*/*.json"):
        path.unlink()
    assert missing_values(results, tmp_path / "html") == ["no result file is recorded"]


def test_publishing_leaves_the_configuration_beside_the_pages_alone(repo, recorded, tmp_path):
    """As benchmarks/asv.conf.json lies beside benchmarks/html."""
    (tmp_path / "asv.conf.json").write_text("mine")
    publish_pages(recorded("first"), tmp_path / "html", repo[0], records=tmp_path / "records")
    assert (tmp_path / "asv.conf.json").read_text() == "mine"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(results, html) of one file with two values, both drawn."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        path = tmp_path_factory.mktemp("published")
        monkeypatch.setenv("HOME", str(path))
        (path / "repo").mkdir()
        git("init", "--quiet", "--initial-branch", "main", repo=path / "repo")
        (path / "repo" / "file").write_text("0")
        git("add", "file", repo=path / "repo")
        monkeypatch.setattr("convert.HERE", path / "repo")
        monkeypatch.setattr("record.HERE", path)
        monkeypatch.setenv("GEMLINE_COMMIT", commit(path / "repo", "one") + "-clean")
        found = [Measurement(case="a.b", unit=unit, samples=(1.0,)) for unit in ("ms", "J")]
        write_measurements(path / "one.json", found, ceilings={"copy_bytes_per_s": 4e12}, before=GPU, after=GPU)
        convert(path / "one.json", results=path / "results", records=path / "records")
        assert publish_pages(path / "results", path / "html", path / "repo", records=path / "records") == []
    return path / "results", path / "html"


def altered(published, tmp_path, change):
    """missing_values after `change` of the result file's {benchmark: values}, the pages as they are."""
    results = tmp_path / "results"
    shutil.copytree(published[0], results)
    path = next(path for path in results.glob("*/*.json") if path.name != "machine.json")
    tree = json.loads(path.read_text())
    change(tree["results"], tree["result_columns"])
    path.write_text(json.dumps(tree))
    return [line.partition("json: ")[2] for line in missing_values(results, published[1])]


def test_a_file_without_results_is_missed(published, tmp_path):
    found = altered(published, tmp_path, lambda results, _: results.clear())
    assert found == ["none of its 0 values is drawn (0 failed or skipped, 0 of cases that have changed since)"]


def test_a_file_of_failures_alone_is_missed(published, tmp_path):
    def fail(results, columns):
        for values in results.values():
            values[columns.index("result")] = [None]

    found = altered(published, tmp_path, fail)
    assert found == ["none of its 2 values is drawn (2 failed or skipped, 0 of cases that have changed since)"]


def test_a_file_of_changed_cases_alone_is_missed(published, tmp_path):
    def age(results, columns):
        for values in results.values():
            values[columns.index("version")] = "gpu 0"

    found = altered(published, tmp_path, age)
    assert found == ["none of its 2 values is drawn (0 failed or skipped, 2 of cases that have changed since)"]


def test_one_failure_or_changed_case_beside_a_drawn_value_is_right(published, tmp_path):
    def fail_and_age(results, columns):
        first = next(iter(results.values()))
        first[columns.index("result")] = [None]

    assert altered(published, tmp_path, fail_and_age) == []


def test_records_are_results_or_named_with_a_reason(published, tmp_path):
    results, records = published[0], tmp_path / "records"
    shutil.copytree(results.parent / "records", records)
    assert missing_records(records, results) == []
    (records / "comm.json").write_text(json.dumps({"sizes": []}))
    assert missing_records(records, results) == [
        "records/comm.json: neither measurements for asv nor named in records.toml with a reason"
    ]
    listed = records / "records.toml"
    listed.write_text('[before_the_writer]\n"comm.json" = "a table"\n"gone.json" = "a table"\n')
    assert missing_records(records, results) == ["records.toml: there is no gone.json"]
    listed.write_text('[own_form]\n"comm.json" = "a table"\n')
    assert missing_records(records, results) == ["records/comm.json: lacks all facts"]
    listed.write_text('[own_form]\n"comm.json" = " "\n')
    with pytest.raises(ValueError, match=r"comm\.json has no reason"):
        missing_records(records, results)
    listed.write_text('[other]\n"comm.json" = "a table"\n')
    with pytest.raises(ValueError, match="unknown tables"):
        missing_records(records, results)


def test_measurements_that_are_no_results_are_missed(published, tmp_path):
    results = published[0]
    records = tmp_path / "records"
    shutil.copytree(results.parent / "records", records)
    file = next(records.glob("*.json"))
    tree = json.loads(file.read_text())
    tree["measurements"].append({"case": "a.new", "unit": "ms", "samples": [1.0], "facts": {}})
    file.write_text(json.dumps(tree))
    assert missing_records(records, results) == [
        f"records/{file.name}: a.new.time_device is no asv result of its commit"
    ]
    file.rename(records / "bench.json")
    assert len(missing_records(records, results)) == 3


def test_stored_measurements_need_their_facts(published, tmp_path):
    results, records = published[0], tmp_path / "records"
    shutil.copytree(results.parent / "records", records)
    file = next(records.glob("*.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ceilings": {}, "dirty": None}))
    assert missing_records(records, results) == [f"records/{file.name}: lacks dirty, ceilings"]
    (records / "records.toml").write_text(f'[before_the_writer]\n"{file.name}" = "an old one"\n')
    assert missing_records(records, results) == []


def test_the_records_of_this_repository_are_accounted_for():
    assert missing_records(RECORDS, RESULTS) == []
