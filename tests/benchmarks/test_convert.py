"""Measurements of a GPU host become asv results of a machine with the GPU's name."""

from __future__ import annotations

import json
import re

import pytest
from convert import convert, machine_name
from device import DeviceRecord
from gate_asv import ROOT, git, load
from record import Measurement, commit_at_hand, lacking, read_measurements, write_measurements, write_record

CEILINGS = {"bf16_matmul_flop_per_s": 7.8e14, "copy_bytes_per_s": 4.2e12}
BUSY = DeviceRecord(
    name="NVIDIA H200", driver="580.1", sm_clock_mhz=1740, power_cap_w=700.0, throttle_reasons=("software_power_cap",)
)


@pytest.fixture(autouse=True)
def without_git(tmp_path, monkeypatch):
    """As on a GPU host, where the copy of this repository has none."""
    monkeypatch.setattr("record.HERE", tmp_path)
    monkeypatch.delenv("GEMLINE_COMMIT", raising=False)


ENERGY = Measurement(case="a.b", unit="J", samples=(0.25,))


def file_with(path, *measurements, device=BUSY, ceilings=CEILINGS):
    write_measurements(path, [*measurements, ENERGY], ceilings=ceilings, before=device, after=device)
    return path


def test_values_units_and_machine(tmp_path):
    found = [
        Measurement(case="attention_gpu.forward", unit="ms", samples=(3.0, 1.0, 2.0)),
        Measurement(case="attention_gpu.forward", unit="J", samples=(0.25,)),
    ]
    path = file_with(tmp_path / "bench.json", *found)
    stored = convert(path, results=tmp_path / "results", records=tmp_path / "records", commit="HEAD")
    head = git("rev-parse", "HEAD", repo=ROOT)
    assert stored.parent.name == "nvidia-h200"
    assert stored.name.startswith(head[:8])
    result = load(stored)
    assert result.commit_hash == head
    assert result.get_result_value("attention_gpu.forward.time_device", []) == [pytest.approx(0.002)]
    assert result.get_result_samples("attention_gpu.forward.time_device", [])[0] == pytest.approx([0.003, 0.001, 0.002])
    assert result.get_result_value("attention_gpu.forward.track_joules", []) == [0.25]
    machine = json.loads((stored.parent / "machine.json").read_text())
    assert (machine["machine"], machine["gpu"], machine["gpu_power_cap_w"]) == ("nvidia-h200", "NVIDIA H200", "700")
    raw = json.loads(next((tmp_path / "records").iterdir()).read_text())
    assert raw["device_before"]["throttle_reasons"] == ["software_power_cap"]


def test_a_second_file_of_a_commit_adds_to_the_first(tmp_path):
    for name in ("one", "two"):
        path = file_with(tmp_path / f"{name}.json", Measurement(case=f"a.{name}", unit="ms", samples=(1.0,)))
        stored = convert(path, results=tmp_path / "results", records=tmp_path / "records", commit="HEAD")
    assert set(load(stored).get_all_result_keys()) == {"a.b.track_joules", "a.one.time_device", "a.two.time_device"}
    names = json.loads((tmp_path / "results" / "benchmarks.json").read_text())
    assert {"a.one.time_device", "a.two.time_device"} <= names.keys()


def test_refusals(tmp_path):
    one = Measurement(case="a.b", unit="ms", samples=(1.0,))
    none = file_with(tmp_path / "none.json", one, device=DeviceRecord(name="none"))
    with pytest.raises(ValueError, match="without a GPU"):
        convert(none, results=tmp_path, records=tmp_path, commit="HEAD")
    untold = file_with(tmp_path / "untold.json", one, device=DeviceRecord(name="unknown, pynvml absent"))
    with pytest.raises(ValueError, match="unknown, pynvml absent: a number without clocks"):
        convert(untold, results=tmp_path, records=tmp_path, commit="HEAD")
    good = file_with(tmp_path / "good.json", one)
    with pytest.raises(ValueError, match="'nowhere' is not in this repository"):
        convert(good, results=tmp_path, records=tmp_path, commit="nowhere")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"format": "else"}))
    with pytest.raises(ValueError, match="format 'else'"):
        read_measurements(other)


def test_a_file_without_its_facts_is_refused(tmp_path, monkeypatch):
    one, places = Measurement(case="a.b", unit="ms", samples=(1.0,)), {"results": tmp_path, "records": tmp_path / "r"}
    idle = DeviceRecord(name="NVIDIA H200", driver="580.1", power_cap_w=700.0, throttle_reasons=("gpu_idle",))
    bare = file_with(tmp_path / "bare.json", one, device=idle, ceilings={})
    lacks = (
        r"bare\.json lacks device_before\.sm_clock_mhz, device_after\.sm_clock_mhz, device_before at work .*, ceilings:"
    )
    with pytest.raises(ValueError, match=lacks):
        convert(bare, **places, commit="HEAD")
    write_measurements(tmp_path / "free.json", [one], ceilings=CEILINGS, before=BUSY, after=BUSY)
    with pytest.raises(ValueError, match=r"free\.json lacks energy"):
        convert(tmp_path / "free.json", **places, commit="HEAD")
    monkeypatch.setenv("GEMLINE_COMMIT", git("rev-parse", "HEAD", repo=ROOT))
    with pytest.raises(ValueError, match=r"one\.json lacks dirty"):
        convert(file_with(tmp_path / "one.json", one), **places)
    assert not (tmp_path / "r").exists()
    write_measurements(
        tmp_path / "bare.json", [one], ceilings=CEILINGS, before=BUSY, after=BUSY, without={"energy": "no counter"}
    )
    convert(tmp_path / "bare.json", **places, commit="HEAD")
    (stored,) = (tmp_path / "r").iterdir()
    assert lacking(json.loads(stored.read_text())) == []  # what is stored, publish takes


def test_nothing_measured_writes_no_file(tmp_path):
    with pytest.raises(ValueError, match="nothing was measured"):
        write_measurements(tmp_path / "empty.json", [], ceilings={}, before=BUSY, after=BUSY)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no samples"):
        Measurement(case="a.b", unit="ms", samples=())
    with pytest.raises(ValueError, match="unit 'hours'"):
        Measurement(case="a.b", unit="hours", samples=(1.0,))


def test_machine_names():
    assert machine_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_a_commit_other_than_the_measured_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMLINE_COMMIT", git("rev-parse", "HEAD", repo=ROOT))
    path = file_with(tmp_path / "a.json", Measurement(case="a.b", unit="ms", samples=(1.0,)))
    with pytest.raises(ValueError, match="--commit HEAD~1 is not the commit that was measured"):
        convert(path, results=tmp_path / "results", records=tmp_path / "records", commit="HEAD~1")
    assert not (tmp_path / "results").exists()
    convert(path, results=tmp_path / "results", records=tmp_path / "records", commit="HEAD")


def test_a_tree_that_was_not_as_committed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMLINE_COMMIT", git("rev-parse", "HEAD", repo=ROOT) + "-dirty")
    path = file_with(tmp_path / "a.json", Measurement(case="a.b", unit="ms", samples=(1.0,)))
    assert json.loads(path.read_text())["dirty"] is True
    with pytest.raises(ValueError, match="measured on a tree with uncommitted changes"):
        convert(path, results=tmp_path / "results", records=tmp_path / "records")


def test_the_commit_is_gits_or_the_named_one(tmp_path, monkeypatch):
    assert commit_at_hand() == (None, None)
    for given, expected in {"abc": ("abc", None), "abc-clean": ("abc", False), "abc-dirty": ("abc", True)}.items():
        monkeypatch.setenv("GEMLINE_COMMIT", given)
        assert commit_at_hand() == expected
    monkeypatch.setenv("GEMLINE_COMMIT", "abc-later")
    with pytest.raises(ValueError, match="expected a commit, alone or with -clean or -dirty"):
        commit_at_hand()
    monkeypatch.delenv("GEMLINE_COMMIT")
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr("record.HERE", tmp_path / "benchmarks")
    git("init", "--quiet", repo=tmp_path)
    (tmp_path / "file").write_text("as committed")
    git("add", "file", repo=tmp_path)
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "one", repo=tmp_path)
    head = git("rev-parse", "HEAD", repo=tmp_path)
    (tmp_path / "results.json").write_text("git does not know this one")
    assert commit_at_hand() == (head, False)
    (tmp_path / "file").write_text("changed")
    assert commit_at_hand() == (head, True)
    monkeypatch.setenv("GEMLINE_COMMIT", "abc")
    with pytest.raises(ValueError, match=f"GEMLINE_COMMIT is abc, but .* is at {head}"):
        commit_at_hand()
    monkeypatch.delenv("GEMLINE_COMMIT")
    (tmp_path / "other" / "benchmarks").mkdir(parents=True)
    monkeypatch.setattr("record.HERE", tmp_path / "other" / "benchmarks")  # a copy within somebody else's repository
    assert commit_at_hand() == (None, None)


def test_a_record_has_all_facts_or_says_which_not(tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "record.json"
    monkeypatch.setenv("GEMLINE_COMMIT", "abc-clean")
    found = {"worlds": {1: {"ms": 1.0, "joules": 2.0}}}
    write_record(path, found, ceilings=CEILINGS, before=BUSY, after=BUSY)
    tree = json.loads(path.read_text())
    assert (tree["commit"], tree["dirty"], tree["worlds"]) == ("abc", False, {"1": {"ms": 1.0, "joules": 2.0}})
    assert tree["device_before"]["throttle_reasons"] == ["software_power_cap"]
    assert tree["ceilings"] == CEILINGS
    assert {"torch", "python"} <= tree["versions"].keys()
    assert lacking(tree) == []
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("GEMLINE_COMMIT")
    idle = DeviceRecord(name="NVIDIA H200", driver="580.1", sm_clock_mhz=345, throttle_reasons=("gpu_idle",))
    write_record(path, {"rows": [{"joules": None}]}, ceilings={}, before=idle, after=BUSY)
    expected = ["commit", "dirty", "device_before.power_cap_w", "device_before at work (it is the idle card)"]
    assert lacking(json.loads(path.read_text())) == [*expected, "ceilings", "energy"]
    assert "lacks commit, dirty, device_before.power_cap_w" in capsys.readouterr().err
    with pytest.raises(ValueError, match="the writer's too: ceilings"):
        write_record(path, {"ceilings": 3}, ceilings={}, before=BUSY, after=BUSY)


def test_a_reason_stands_for_a_fact(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMLINE_COMMIT", "abc-clean")
    path = tmp_path / "record.json"
    refused = {"rows": [{"joules": None, "energy_unavailable": "Not Supported"}]}
    write_record(path, refused, ceilings={}, before=BUSY, after=BUSY, without={"ceilings": "nothing is timed"})
    assert lacking(json.loads(path.read_text())) == []
    uncapped = DeviceRecord(
        name="NVIDIA H200",
        driver="580.1",
        sm_clock_mhz=1740,
        throttle_reasons=(),
        unavailable={"power_cap_w": "Not Supported"},
    )
    write_record(path, refused, ceilings=CEILINGS, before=uncapped, after=uncapped)
    assert lacking(json.loads(path.read_text())) == []


def test_every_program_on_a_gpu_writes_through_the_writer():
    """What leaves results in $OUT or --out does so with the facts; ranks hand theirs to the program that does."""
    programs = [*(ROOT / "benchmarks" / "gpu").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    texts = {path.name: path.read_text() for path in programs}
    leaving = {name for name, text in texts.items() if re.search(r'"OUT"|"--out"', text)}
    assert {"attention_compare.py", "bench_blocks.py", "comm.py", "parallel.py", "request_level.py"} <= leaving
    without = {name for name in leaving if not re.search(r"\bwrite_(record|measurements)\(", texts[name])}
    assert without == set()
    ceilings_and_device = {name for name in leaving if not re.search(r"\bceilings=", texts[name])}
    assert ceilings_and_device == set()


def test_energy_of_the_block_is_by_token(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    from bench_blocks import report

    times = {name: ([4.0, 2.0], [6.0, 6.0]) for name in ("eager", "compiled", "ours")}
    facts = {"flops": (100, 200), "bytes": (10, 20)}
    energy = {"ours": [(2.0, None), (None, "Not Supported")]}
    found = report("gate", "rms", times, energy, tokens=1000, facts=facts, ceilings=CEILINGS)
    joules = [m for m in found if m.unit == "J"]
    assert [(m.case, m.samples, m.facts["tokens"]) for m in joules] == [
        ("blocks_gpu.gate_rms_ours_forward", (0.002,), 1000)
    ]
    backward = next(m for m in found if m.case == "blocks_gpu.gate_rms_ours_backward")
    assert backward.facts["energy_unavailable"] == "Not Supported"
