"""The device record, with a stand-in for NVIDIA's library."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from device import (
    DeviceRecord,
    EnergyMeter,
    describe_device,
    describe_working_device,
    energy_per_sample,
    joules_per_call,
)


@pytest.fixture(autouse=True)
def torch_devices(monkeypatch):
    """torch sees these cards, in this order, as with CUDA_VISIBLE_DEVICES=3,0."""
    uuids = ["card3", "card0"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    return uuids


class FakeNvml:
    """A host whose cards answer everything, except what is named in `refuses`."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, *refuses):
        self.refuses = refuses
        self.energy_mj = 1_000_000

    def find(self, uuid):
        known = {b"GPU-card0": 0, b"GPU-card3": 3, b"MIG-part": "part"}
        if uuid not in known:
            raise self.NVMLError("Not Found")
        return known[uuid]

    def __getattr__(self, name):
        answers = {
            "nvmlDeviceGetHandleByUUID": self.find,
            "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
            "nvmlSystemGetDriverVersion": lambda: "580.159.03",
            "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
            "nvmlDeviceGetPowerUsage": lambda handle: {3: 612_345, 0: 75_000, "part": 75_000}[handle],
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
            "nvmlDeviceGetTemperature": lambda handle, sensor: 55,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4 | 0x20,
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: self.energy_mj if handle == 3 else 0,
        }
        if name not in answers:
            raise AttributeError(name)
        if name in self.refuses:

            def refuse(*_):
                raise self.NVMLError("Not Supported")

            return refuse
        return answers[name]


def test_a_card_that_answers():
    assert describe_device(0, nvml=FakeNvml()) == DeviceRecord(
        name="NVIDIA H200",
        driver="580.159.03",
        sm_clock_mhz=1980,
        sm_clock_max_mhz=1980,
        memory_clock_mhz=3201,
        power_w=612.345,
        power_cap_w=700.0,
        temperature_c=55,
        throttle_reasons=("software_power_cap", "software_thermal_slowdown"),
        unavailable={},
    )


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_cap_w"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", "throttle_reasons"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlSystemGetDriverVersion", "driver"),
    ],
)
def test_a_refused_question_is_named_and_the_rest_answered(question, field):
    record = describe_device(0, nvml=FakeNvml(question))
    assert getattr(record, field) is None
    assert record.unavailable == {field: "Not Supported"}
    assert record.name == "NVIDIA H200"


def test_the_card_is_torchs_and_not_nvmls_of_that_number():
    assert describe_device(0, nvml=FakeNvml()).power_w == 612.345
    assert describe_device(1, nvml=FakeNvml()).power_w == 75.0
    card = FakeNvml()
    with EnergyMeter(0, nvml=card) as busy, EnergyMeter(1, nvml=card) as idle:
        card.energy_mj += 84_000
    assert (busy.joules, idle.joules) == (84.0, 0.0)


def test_a_part_of_a_card(torch_devices):
    torch_devices[0] = "part"
    assert describe_device(0, nvml=FakeNvml()).power_w == 75.0


def test_a_card_that_nvml_does_not_know(torch_devices):
    torch_devices[0] = "elsewhere"
    record = describe_device(0, nvml=FakeNvml())
    assert record.name == "unknown, NVML does not find elsewhere"
    assert record.unavailable == {"name": "Not Found"}
    with EnergyMeter(0, nvml=FakeNvml()) as meter:
        pass
    assert meter.joules is None
    assert meter.unavailable == "NVML does not find elsewhere: Not Found"


def test_without_a_card_the_record_is_named_none():
    record = describe_device(2, nvml=FakeNvml())
    assert record.name == "none"
    assert record.unavailable == {"name": "torch has no GPU number 2"}
    assert EnergyMeter(2, nvml=FakeNvml()).unavailable == "torch has no GPU number 2"


def test_without_nvidias_python_module(monkeypatch):
    """Not the same as a host without a driver, and not the same as one without a GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import raises ImportError
    record = describe_device()
    assert record.name == "unknown, pynvml absent"
    assert record.unavailable == {"nvml": "pynvml absent"}
    with EnergyMeter() as meter:
        pass
    assert (meter.joules, meter.joules_per_sample(10), meter.unavailable) == (None, None, "pynvml absent")


def test_without_a_driver(monkeypatch):
    def no_library():
        raise FakeNvml.NVMLError("Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=FakeNvml.NVMLError, nvmlInit=no_library))
    assert describe_device().name == "unknown, no NVIDIA driver answers (Shared Library Not Found)"
    assert EnergyMeter().unavailable == "no NVIDIA driver answers (Shared Library Not Found)"


def test_energy_per_sample():
    card = FakeNvml()
    with EnergyMeter(nvml=card) as meter:
        card.energy_mj += 84_000
    assert meter.joules == 84.0
    assert meter.joules_per_sample(4000) == pytest.approx(0.021)


def test_energy_of_a_call_is_taken_over_many():
    """A counter that is renewed only when the device is waited for, as by a loop that is long enough."""
    card, calls, waits = FakeNvml(), [], []

    def wait():
        waits.append(len(calls))
        card.energy_mj = 1_000_000 + 1500 * len(calls)

    joules, why_not = joules_per_call(lambda: calls.append(1), wait=wait, at_least_s=0.01, nvml=card)
    assert joules == pytest.approx(1.5)
    assert why_not is None
    assert waits[0] == 10
    assert waits[-1] == len(calls)
    refused = FakeNvml("nvmlDeviceGetTotalEnergyConsumption")
    assert joules_per_call(lambda: None, wait=lambda: None, at_least_s=0.0, nvml=refused)[0] is None


def test_energy_of_exactly_so_many_calls():
    """Collectives: a rank that calls once more than the others waits for ever."""
    calls = []
    joules_per_call(lambda: calls.append(1), wait=lambda: None, calls=23, nvml=FakeNvml())
    assert len(calls) == 23


def test_energy_of_all_ranks_for_the_samples_of_all():
    """30 J for 10 samples here, 60 J for 20 on the other rank."""
    other = torch.tensor([[60.0, 20.0]], dtype=torch.float64)
    found = energy_per_sample([10.0, 20.0], [4, 6], why_not=None, gather=lambda rows: torch.cat([rows, other]))
    assert found == {"joules_per_sample": 3.0, "energy_unavailable": None}
    none = energy_per_sample([10.0, None], [4, 6], why_not="Not Supported", gather=lambda rows: rows)
    assert none == {"joules_per_sample": None, "energy_unavailable": "Not Supported"}


def test_the_working_card_is_looked_at_while_it_works():
    card, events = FakeNvml(), []
    find = card.find
    card.find = lambda uuid: events.append("look") or find(uuid)
    record = describe_working_device(
        0, seconds=0.0, work=lambda: events.append("work"), wait=lambda: events.append("wait"), nvml=card
    )
    assert events == ["look", "work", "look", "wait"]
    assert record.sm_clock_mhz == 1980
    events.clear()
    describe_working_device(
        0, seconds=0.005, work=lambda: events.append("work"), wait=lambda: events.append("wait"), nvml=card
    )
    assert events[:3] == ["look", "work", "wait"]
    assert events[-3:] == ["work", "look", "wait"]
    assert describe_working_device(7, nvml=card).name == "none"


def test_a_card_without_an_energy_counter():
    with EnergyMeter(nvml=FakeNvml("nvmlDeviceGetTotalEnergyConsumption")) as meter:
        pass
    assert meter.joules is None
    assert meter.unavailable == "Not Supported"


def test_the_record_is_json():
    assert describe_device(0, nvml=FakeNvml()).to_json()["throttle_reasons"] == [
        "software_power_cap",
        "software_thermal_slowdown",
    ]
