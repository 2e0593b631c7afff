"""The timers: sleeping is not work, spinning is, and the GPU is waited for (kymatio issues 658, 845)."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timing
import torch
from timing import YardstickClock, cpu_clock, cpu_seconds, device_milliseconds


def spin(seconds):
    stop = time.process_time() + seconds
    while time.process_time() < stop:
        pass


def test_sleep_costs_no_cpu_time_and_spinning_does():
    slept = cpu_seconds(lambda: time.sleep(0.05), repeat=3)
    spun = cpu_seconds(lambda: spin(0.05), repeat=3)
    assert len(slept) == len(spun) == 3
    assert max(slept) < 0.02
    assert 0.045 < statistics.median(spun) < 0.09


def test_the_yardstick_corrects_for_a_slower_machine(monkeypatch):
    """Everything takes twice as long, the yardstick too: the same corrected seconds, and none for the yardsticks."""
    now, slowness = [0.0], [1.0]

    def work(seconds):
        now[0] += seconds * slowness[0]

    monkeypatch.setattr("timing.cpu_clock", lambda: now[0])
    clock = YardstickClock()

    def yardstick():
        work(0.0004)
        return 0.0004 * slowness[0]

    monkeypatch.setattr(clock, "_measure", yardstick)

    def measured():
        clock()
        start = clock()
        work(0.01)
        return clock() - start

    fast = measured()
    slowness[0] = 2.0
    slow = measured()
    assert fast == pytest.approx(0.01)
    assert slow == pytest.approx(fast)


@pytest.mark.slow  # real time of a machine that does nothing else
def test_the_yardstick_sees_more_work():
    clock = YardstickClock()

    def measured(seconds):
        samples = []
        for _ in range(9):
            start = clock()
            spin(seconds)
            samples.append(clock() - start)
        return statistics.median(samples)

    assert 1.5 < measured(0.02) / measured(0.01) < 2.7


def test_children_are_counted():
    code = "import time\nstop = time.process_time() + 0.1\nwhile time.process_time() < stop: pass"
    before = cpu_clock()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert cpu_clock() - before > 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="about hosts without a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        device_milliseconds(lambda: None, repeat=1)


@pytest.mark.gpu
def test_the_device_is_waited_for():
    """A kernel that only sleeps: its launch takes microseconds, its run the time asked for."""
    cycles = 20_000_000
    short = statistics.median(device_milliseconds(lambda: torch.cuda._sleep(cycles), repeat=5, warm_up=2))
    long = statistics.median(device_milliseconds(lambda: torch.cuda._sleep(4 * cycles), repeat=5, warm_up=2))
    assert short > 5
    assert 3.5 < long / short < 4.5


@pytest.mark.gpu
def test_a_lead_hides_the_launch_and_not_the_kernel():
    x = torch.zeros(1 << 28, dtype=torch.int8, device="cuda")
    plain = statistics.median(device_milliseconds(lambda: x.add_(1), repeat=20))
    led = statistics.median(device_milliseconds(lambda: x.add_(1), repeat=20, lead_cycles=2_000_000))
    assert led > 0.03  # 512 MB moved: more than 0.1 ms on any card of today, never nothing
    assert led < 1.5 * plain


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator alone gives memory back so")
def test_kept_memory_is_not_cleared_anew_in_every_call():
    """A call of this case took 300 to 500 page faults in one process and none in another."""
    program = """
import resource, timing
from cases import find, prepare
timing.keep_memory()
case = find("comm.codec_int8_ragged")
inputs = prepare(case)
for _ in range(10):
    case.run(inputs)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    case.run(inputs)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""
    folder = Path(timing.__file__).parent
    found = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 60  # now and then a block lies elsewhere
