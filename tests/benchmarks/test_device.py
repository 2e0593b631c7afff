"""The device record, with a stand-in for NVIDIA's library."""

from __future__ import annotations

import pytest
from device import DeviceRecord, EnergyMeter, describe_device, joules_per_call


class FakeNvml:
    """A card that answers everything, except what is named in `refuses`."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, *refuses):
        self.refuses = refuses
        self.energy_mj = 1_000_000

    def __getattr__(self, name):
        answers = {
            "nvmlDeviceGetHandleByIndex": lambda index: ("handle", index),
            "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
            "nvmlSystemGetDriverVersion": lambda: "580.159.03",
            "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
            "nvmlDeviceGetPowerUsage": lambda handle: 612_345,
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
            "nvmlDeviceGetTemperature": lambda handle, sensor: 55,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4 | 0x20,
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: self.energy_mj,
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


def test_without_a_card_the_record_is_named_none():
    record = describe_device(3, nvml=FakeNvml("nvmlDeviceGetHandleByIndex"))
    assert record.name == "none"
    assert record.unavailable == {"name": "Not Supported"}


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr("device.load_nvml", lambda: None)
    assert describe_device().name == "none"
    with EnergyMeter() as meter:
        pass
    assert meter.joules is None
    assert meter.joules_per_sample(10) is None
    assert "driver" in meter.unavailable


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
