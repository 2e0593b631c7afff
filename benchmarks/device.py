"""What a GPU number must be read with: which GPU, its driver, clocks, power cap, throttle reasons, energy.

    before = describe_device(0)
    with EnergyMeter(0) as meter:
        ...                                     # 4000 samples
    meter.joules / 4000                         # None without a meter in the GPU

Two runs of one kernel on one card can differ by a fifth because of clocks and the power cap alone, so a number without
them cannot be compared. Where torch has no GPU the record is named "none"; where it has one that nothing can be asked
of (no nvidia-ml-py, no driver library) "unknown, " and why. A question that a card does not answer (cards differ, and
virtual ones refuse many) leaves None there and its reason in `unavailable`. Everything is asked of NVML, through
nvidia-ml-py; nothing is changed on the device.

Devices are numbered as torch numbers them, and found in NVML by their UUID: NVML numbers all cards of the host by their
bus address, torch those of CUDA_VISIBLE_DEVICES (or of a container) in its order, so that equal numbers are two cards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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


class NoDeviceError(Exception):
    """There is nothing to ask; the message says why, in a few words."""


def load_nvml() -> ModuleType:
    """The NVML module, started. Raises NoDeviceError without nvidia-ml-py, and where no driver answers."""
    try:
        import pynvml
    except ImportError as error:
        raise NoDeviceError("pynvml absent") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDeviceError(f"no NVIDIA driver answers ({error})") from error
    return pynvml


def device_uuid(index: int) -> str | None:
    """UUID of torch's GPU number `index`, without its prefix; None where torch has no such GPU."""
    import torch

    if index >= torch.cuda.device_count():
        return None
    return str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")


def find_handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of a device of torch; a part of a card (MIG) has a UUID of its own kind."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except nvml.NVMLError as whole:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode())
        except nvml.NVMLError:
            raise whole from None


def text(value: str | bytes) -> str:
    """NVML's strings are bytes in older bindings."""
    return value.decode() if isinstance(value, bytes) else value


def describe_device(index: int = 0, *, nvml: Any = None) -> DeviceRecord:
    """Look at torch's GPU number `index`. `nvml`: the module to ask (tests give a stand-in); default: NVIDIA's."""
    uuid = device_uuid(index)
    if uuid is None:
        return DeviceRecord(name="none", unavailable={"name": f"torch has no GPU number {index}"})
    try:
        nvml = nvml or load_nvml()
    except NoDeviceError as error:
        return DeviceRecord(name=f"unknown, {error}", unavailable={"nvml": str(error)})
    unavailable: dict[str, str] = {}

    def ask(what: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError as error:
            unavailable[what] = str(error)
            return None

    handle = ask("name", lambda: find_handle(nvml, uuid))
    if handle is None:
        return DeviceRecord(name=f"unknown, NVML does not find {uuid}", unavailable=unavailable)
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


def describe_working_device(
    index: int = 0,
    *,
    seconds: float = 0.3,
    work: Callable[[], object] | None = None,
    wait: Callable[[], object] | None = None,
    nvml: Any = None,
) -> DeviceRecord:
    """Look at torch's GPU number `index` while it computes, after it has for `seconds`: clocks and power of a card that
    has nothing to do (345 of 1980 MHz) say nothing of those at which it is measured. Without a GPU as describe_device.

    work, wait   what keeps the card busy for about 0.1 s and what waits for it; default: bf16 matrix products
    """
    idle = describe_device(index, nvml=nvml)  # also starts NVML, which may take longer than the work does
    if idle.name == "none":
        return idle
    if work is None or wait is None:
        work, wait = matrix_products(index)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        work()
        wait()
    work()
    record = describe_device(index, nvml=nvml)
    wait()
    return record


def matrix_products(index: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """(launch 500 products of 4096^3, about 0.1 s; wait for them)."""
    import torch

    device = torch.device("cuda", index)
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def work() -> None:
        for _ in range(500):
            torch.matmul(a, a, out=out)

    return work, lambda: torch.cuda.synchronize(device)


class EnergyMeter:
    """Energy that torch's GPU number `index` used between entering and leaving, from its own counter (whole board).

    index        None: there is none, the CPU computes
    joules       after leaving; None without a GPU or a counter
    unavailable  why there is none
    """

    def __init__(self, index: int | None = 0, *, nvml: Any = None) -> None:
        self._start: int | None = None
        self._nvml: Any = None
        self.joules: float | None = None
        self.unavailable: str | None = None
        uuid = None if index is None else device_uuid(index)
        try:
            if index is None:
                raise NoDeviceError("measured on the CPU")
            if uuid is None:
                raise NoDeviceError(f"torch has no GPU number {index}")
            nvml = nvml or load_nvml()
            self._handle = find_handle(nvml, uuid)
            self._nvml = nvml
        except NoDeviceError as error:
            self.unavailable = str(error)
        except nvml.NVMLError as error:
            self.unavailable = f"NVML does not find {uuid}: {error}"

    def _read(self) -> int | None:
        """The counter, in millijoules."""
        if self._nvml is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
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
    calls: int | None = None,
    index: int = 0,
    nvml: Any = None,
) -> tuple[float | None, str | None]:
    """(energy of one call in J, why there is none).

    Calls in groups of 10, `wait` (torch.cuda.synchronize) after each group, until `at_least_s` have passed: cards renew
    their energy counter about ten times a second, so a short loop would read 0. `calls`: exactly so many instead, for
    collectives, which all ranks must call equally often.
    """
    done, start = 0, time.perf_counter()
    with EnergyMeter(index, nvml=nvml) as meter:
        while time.perf_counter() - start < at_least_s if calls is None else done < calls:
            for _ in range(10 if calls is None else min(10, calls - done)):
                function()
                done += 1
            wait()
    return meter.joules_per_sample(done), meter.unavailable


def energy_per_sample(
    joules: Sequence[float | None], samples: Sequence[int], *, why_not: str | None, gather: Callable[[Any], Any]
) -> dict[str, Any]:
    """{"joules_per_sample", "energy_unavailable"}: energy of all ranks' cards for each of all ranks' samples.

    joules, samples  of this rank, of every time that was metered; None once is None for all, with this rank's reason
    gather           rows of all ranks from this rank's, (1, 2) float64
    """
    import torch

    own = math.nan if None in joules else math.fsum(one for one in joules if one is not None)
    total, count = gather(torch.tensor([[own, float(sum(samples))]], dtype=torch.float64)).sum(0).tolist()
    if math.isnan(total):
        return {"joules_per_sample": None, "energy_unavailable": why_not or "another rank has no counter"}
    return {"joules_per_sample": total / count if count else None, "energy_unavailable": None}
