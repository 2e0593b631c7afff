"""Measurements of a GPU host become asv results of a machine with the GPU's name."""

from __future__ import annotations

import json

import pytest
from convert import convert, machine_name
from device import DeviceRecord
from gate_asv import ROOT, git, load
from record import Measurement, read_measurements, write_measurements

GPU = DeviceRecord(name="NVIDIA H200", driver="580.1", power_cap_w=700.0, throttle_reasons=("software_power_cap",))


def file_with(path, *measurements, device=GPU):
    write_measurements(path, measurements, ceilings={}, before=device, after=device)
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
    assert set(load(stored).get_all_result_keys()) == {"a.one.time_device", "a.two.time_device"}
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


def test_nothing_measured_writes_no_file(tmp_path):
    with pytest.raises(ValueError, match="nothing was measured"):
        write_measurements(tmp_path / "empty.json", [], ceilings={}, before=GPU, after=GPU)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no samples"):
        Measurement(case="a.b", unit="ms", samples=())
    with pytest.raises(ValueError, match="unit 'hours'"):
        Measurement(case="a.b", unit="hours", samples=(1.0,))


def test_machine_names():
    assert machine_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
