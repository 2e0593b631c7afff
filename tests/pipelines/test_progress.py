"""What is shown while a run goes."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
from gem_pipelines.measure import matmul_peak_flops_per_s
from gem_pipelines.outcome import Throughput, best_possible_ne
from gem_pipelines.progress import ProgressDisplay


def record(step: int) -> dict:
    return {
        "step": step,
        "loss": 0.51234,
        "window_ne": {"click": 0.9, "buy": None},
        "samples_per_s": 1234.5,
        "tokens_per_s": 1e6,
    }


def shown_by(display: ProgressDisplay) -> None:
    display.start(0, total_steps=7)
    for step in range(1, 8):
        display.show(record(step), seconds_left=7.0 - step)
    display.say("a line between")
    display.stop()


def test_one_line_every_few_steps_where_nobody_watches(capsys):
    shown_by(ProgressDisplay(total_steps=7, print_every=3, enabled=True))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/7", "step 3/7", "step 6/7", "step 7/7", "a line between"]
    assert lines[0] == (
        "step 1/7  loss 0.5123  NE click 0.9000 buy undefined  1,234 samples/s  1,000,000 tokens/s  left 6 s"
    )


def test_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    shown_by(ProgressDisplay(total_steps=7, print_every=3, enabled=True))
    text = terminal.getvalue()
    assert "7/7" in text
    assert "NE click 0.9000 buy undefined" in text
    assert "step 3/7" not in text
    assert "a line between" in text


def test_other_ranks_are_silent(capsys):
    shown_by(ProgressDisplay(total_steps=7, print_every=1, enabled=False))
    assert capsys.readouterr().out == ""


def test_throughput_leaves_out_the_first_steps():
    throughput = Throughput()
    assert throughput.summary() == {"samples_per_s": None, "tokens_per_s": None, "share_by_part": {}}
    for seconds in (100.0, 100.0, 100.0, 1.0, 3.0):
        parts = {"read": 1.0, "other": 3.0} if seconds == 3.0 else None
        throughput.add({"rows": 10, "events": 50}, seconds=seconds, parts=parts)
    assert throughput.summary() == {
        "samples_per_s": 5.0,
        "tokens_per_s": 25.0,
        "share_by_part": {"read": 0.25, "other": 0.75},
    }
    assert throughput.seconds_per_step() == 2.0


def test_the_peak_is_what_a_matmul_reaches(monkeypatch):
    """With a clock on which every matmul takes 0.25 s, the peak is 2 * 1024^3 / 0.25."""
    now = iter(range(1000))
    monkeypatch.setattr("gem_pipelines.measure.time.perf_counter", lambda: 0.25 * next(now))
    assert matmul_peak_flops_per_s(torch.device("cpu"), budget_s=0.5) == 2 * 1024**3 / 0.25


def test_memory_grows_with_what_is_held():
    """In a process of its own: in this one, an allocator may hand out memory that is resident already."""
    code = (
        "import torch; from gem_pipelines.measure import memory_bytes; cpu = torch.device('cpu')\n"
        "before = memory_bytes(cpu); held = torch.ones(16 << 20); print(memory_bytes(cpu) - before, held.numel() * 4)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, held = map(int, done.stdout.split())
    assert 0.9 * held < grown < 1.5 * held


@pytest.mark.parametrize(
    ("facts", "expected"), [({}, None), ({"best_ne": {"click": 0.8}}, 0.8), ({"best_ne": {"buy": 0.8}}, None)]
)
def test_best_possible_ne(facts, expected):
    from gem_data.interface import Schema

    assert best_possible_ne(Schema(name="x", created_by="x", tables=(), labels=(), facts=facts), "click") == expected
