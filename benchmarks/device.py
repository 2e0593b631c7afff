"""What a GPU number must be read with: which GPU, its driver, clocks, power cap, throttle reasons, energy.

    before = describe_device(0)
    with EnergyMeter(0) as meter:
        ...                                     # 4000 samples
    meter.joules / 4000                         # None without a meter in the GPU

Two runs of one kernel on one card can differ by a fifth because of clocks and the power cap alone, so a number without
them cannot be compared. Without a GPU (or without NVIDIA's library) the record is named "none"; a question that a card
does not answer (cards differ, and virtual ones refuse many) leaves None there and its reason in `unavailable`.
Everything is asked of NVML, through nvidia-ml-py; nothing is changed on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import ModuleType, TracebackType
from typing import Any

THROTTLE_REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "software_power_cap": 0x4,
    "hardware_slowdown": 0x8,
    "sync_boost": 0x10,
    "software_thermal_slowdown": 0x20,
    "hardware_thermal_slowdown": 0x40,
    "hardware_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """One look at a device. Clocks in MHz, power in W, temperature in degrees Celsius; None: not told."""

    name: str
    driver: str | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    power_cap_w: float | None = None
    temperature_c: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self) | {"throttle_reasons": None if self.throttle_reasons is None else [*self.throttle_reasons]}


def load_nvml() -> ModuleType | None:
    """The NVML module, started; None where there is no NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def text(value: str | bytes) -> str:
    """NVML's strings are bytes in older bindings."""
    return value.decode() if isinstance(value, bytes) else value


def describe_device(index: int = 0, *, nvml: Any = None) -> DeviceRecord:
    """Look at GPU number `index`. `nvml`: the module to ask (tests give a stand-in); default: NVIDIA's."""
    nvml = nvml or load_nvml()
    if nvml is None:
        return DeviceRecord(name="none", unavailable={"nvml": "no NVIDIA driver answers"})
    unavailable: dict[str, str] = {}

    def ask(what: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError as error:
            unavailable[what] = str(error)
            return None

    handle = ask("name", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return DeviceRecord(name="none", unavailable=unavailable)
    mask = ask("throttle_reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    power = ask("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    cap = ask("power_cap_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    driver = ask("driver", nvml.nvmlSystemGetDriverVersion)
    sm, memory = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
    return DeviceRecord(
        name=text(ask("name", lambda: nvml.nvmlDeviceGetName(handle)) or "unnamed"),
        driver=None if driver is None else text(driver),
        sm_clock_mhz=ask("sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, sm)),
        sm_clock_max_mhz=ask("sm_clock_max_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, sm)),
        memory_clock_mhz=ask("memory_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, memory)),
        power_w=None if power is None else power / 1000,
        power_cap_w=None if cap is None else cap / 1000,
        temperature_c=ask("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        throttle_reasons=None if mask is None else tuple(name for name, bit in THROTTLE_REASONS.items() if mask & bit),
        unavailable=unavailable,
    )


class EnergyMeter:
    """Energy that one GPU used between entering and leaving, from its own counter (millijoules, whole board).

    joules       after leaving; None without a GPU or a counter
    unavailable  why there is none
    """

    def __init__(self, index: int = 0, *, nvml: Any = None) -> None:
        self._nvml = nvml or load_nvml()
        self._index = index
        self._start: int | None = None
        self.joules: float | None = None
        self.unavailable: str | None = None if self._nvml else "no NVIDIA driver answers"

    def _read(self) -> int | None:
        if self._nvml is None:
            return None
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except self._nvml.NVMLError as error:
            self.unavailable = str(error)
            return None

    def __enter__(self) -> EnergyMeter:
        self._start = self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self._read()
        if self._start is not None and end is not None:
            self.joules = (end - self._start) / 1000

    def joules_per_sample(self, samples: int) -> float | None:
        """Energy of one of `samples` samples, J."""
        return None if self.joules is None else self.joules / samples


def joules_per_call(
    function: Callable[[], object],
    *,
    wait: Callable[[], object],
    at_least_s: float = 1.0,
    index: int = 0,
    nvml: Any = None,
) -> tuple[float | None, str | None]:
    """(energy of one call in J, why there is none).

    Calls in groups of 10, `wait` (torch.cuda.synchronize) after each group, until `at_least_s` have passed: cards renew
    their energy counter about ten times a second, so a short loop would read 0.
    """
    calls, start = 0, time.perf_counter()
    with EnergyMeter(index, nvml=nvml) as meter:
        while time.perf_counter() - start < at_least_s:
            for _ in range(10):
                function()
            wait()
            calls += 10
    return meter.joules_per_sample(calls), meter.unavailable
