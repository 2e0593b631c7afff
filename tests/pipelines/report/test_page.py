"""The whole report: what it shows, that it stands alone, and that nothing in a run can break out of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gem_pipelines.report import drawing, write_report

MakeRun = Callable[..., Path]
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and collects ids, tags, attributes and the text of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag == "td":
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


def report(run: Path) -> tuple[Page, str, str]:
    """(parsed page, its text, the Markdown)."""
    path = write_report(run)
    assert path == run / "report.html"
    text = path.read_text()
    return Page(text), text, (run / "report.md").read_text()


@pytest.fixture(scope="module")
def completed(completed_run: Path) -> tuple[Page, str, str]:
    return report(completed_run)


def edit(run: Path, change: Callable[[dict], dict | None]) -> None:
    """Changes every record of metrics.jsonl; None drops it."""
    records = (change(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines())
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records if record is not None))


def section(markdown: str, title: str) -> str:
    return markdown.split(f"## {title}", 1)[1].split("\n## ", 1)[0]


def test_a_completed_run_is_shown_in_full(completed: tuple[Page, str, str]) -> None:
    page, text, markdown = completed
    assert "What is missing" not in text + markdown
    assert 'class="absent"' not in text, "every figure is drawn"
    assert page.tags >= {"svg", "table", "pre"}
    for value in ("0.8850", "0.7400", "0.6900", "1.0120", "0.9070", "0.7055", "0.8683", "0.7377", "0.8421", "0.7777"):
        assert value in page.cells, value
    for words in (
        "123,456",
        "4,500,000",
        "65 GFLOP/s (measured)",
        "2.13.0+cpu",
        "12.60%",
        "2026-01-02 00:00:01 UTC",
        "0.3125",
        "model.streams",
        "history, search",
    ):
        assert words in page.text, words
    assert "gemline train --recipe synthetic_cpu --data data/synthetic --train.seed 3" in page.text
    assert "floor: logistic, click 0.907" in page.text, "the floor is named in the figure, with its value"


def test_the_page_stands_alone(completed: tuple[Page, str, str]) -> None:
    page, text, _ = completed
    assert not page.tags & {"script", "link", "iframe", "object", "img", "image", "base"}
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#")
        if not name.startswith("xmlns"):
            assert "//" not in value, (name, value)
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert len(page.ids) == len(set(page.ids)), "ids of the figures do not clash"
    targets = {value[1:] for name, value in page.attributes if name == "xlink:href"}
    targets |= set(re.findall(r"url\(#([^)]*)\)", text))
    assert targets <= set(page.ids)


def test_figures_take_their_colours_from_the_page(completed: tuple[Page, str, str]) -> None:
    """Fixed colours would vanish on a dark or a light page: within figures there are CSS variables only."""
    _, text, _ = completed
    figures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "var(--ink)" in figures
    assert "var(--series-0)" in figures
    assert re.findall(r"#[0-9a-f]{6}\b", figures) == []
    for colour in drawing.CSS_COLOURS.values():
        assert f"{colour[4:-1]}:" in text, "every variable is defined"
    assert "prefers-color-scheme: dark" in text


def test_same_run_same_bytes(completed_run: Path, completed: tuple[Page, str, str]) -> None:
    assert report(completed_run)[1:] == completed[1:]
    written = sorted(path.name for path in completed_run.iterdir() if path.name.startswith("report"))
    assert written == ["report.html", "report.md"]


NAMES = ("<script>alert(1)</script>", "a</title><b>", 'q"onload="x', "$x_{1}^$ & |c`d", "{0}\\n%s", "</svg>", "</pre>")


def test_names_cannot_break_out(make_run: MakeRun) -> None:
    run = make_run(tasks=NAMES, steps=20)
    config = json.loads((run / "config.json").read_text())
    config["name"] = " ".join(NAMES)
    config["data"] |= {name: name for name in NAMES}
    (run / "config.json").write_text(json.dumps(config))
    (run / "command.txt").write_text(f"gemline train --x '{NAMES[0]}'\n```\n# not a title\n")
    floors = {name: {"ne": 0.9, "auc": 0.7} for name in NAMES}
    edit(run, lambda record: record | {"floors": floors} if record["kind"] == "end" else record)
    page, text, markdown = report(run)
    assert "script" not in page.tags
    assert "<script" not in text
    assert "Gemline run: " + " ".join(NAMES) in page.text
    for name in NAMES:
        assert f"model: {name}" in page.cells
        assert f"floor: {name}" in page.cells
        assert drawing.shorten(name) in page.text
    rows = [line for line in section(markdown, "Result").splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 * len(NAMES) + 3  # head and rule; model and floor; two in the facts, one at the end
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {9}, "a | in a name splits no cell"
    before, command = markdown.split("## Repeat this run", 1)
    assert "<" not in before
    assert "\n# not a title" in command.split("````")[1], "the code fence is longer than those in the command"


def resumed_run(make_run: MakeRun) -> Path:
    """60 steps, resumed after 30. A first step of each process is slow; then 1 s a step and, resumed, 0.25 s."""
    run = make_run(tasks=("click",), steps=60)

    def change(record: dict) -> dict:
        if record["kind"] == "end":
            return record | {"resumed_from": 30, "seconds": 99.0, "throughput": {"samples_per_s": 4000.0}}
        if record["kind"] != "train":
            return record
        cold = (record["step"] - 1) % 30 < 3
        seconds = 50.0 if cold else 1.0 if record["step"] <= 30 else 0.25
        record |= {"seconds": seconds, "samples_per_s": 1000 / seconds, "tokens_per_s": 8000 / seconds}
        record |= {"flops_per_s": 4e9 / seconds, "mfu": 0.08 / seconds}
        if "seconds_by_part" in record:
            record["seconds_by_part"] = {"read": 40.0 if cold else 0.1, "sequence": 10.0 if cold else 0.3}
        return record

    edit(run, change)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    start = json.loads(lines[0]) | {"resumed_from": 30, "time": "2026-01-06T10:00:00+00:00", "peak_flops_per_s": 5e10}
    where = next(i for i, line in enumerate(lines) if json.loads(line).get("step") == 31)
    lines.insert(where, json.dumps(start) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    with (run / "command.txt").open("a") as commands:
        commands.write("# resumed from step 30:\ngemline train --resume --run-dir runs/a\n")
    return run


def test_a_resumed_run_is_reported_as_a_whole(make_run: MakeRun) -> None:
    """27 steps of 1 s and 27 of 0.25 s with 1000 samples each: 54,000 samples in 33.75 s."""
    page, _, markdown = report(resumed_run(make_run))
    table = section(markdown, "Throughput")
    for row in (
        "| samples/s | 1.6 k | 2.5 k |",
        "| tokens/s | 12.8 k | 20 k |",
        "| FLOP/s | 6.4 G | 10 G |",
        "| MFU | 12.80% | 20.00% |",
        "| step time | 625 ms | 625 ms |",
    ):
        assert row in table, (row, table)
    assert "All recorded steps of 2 starts, but for the first 3 after each." in table
    assert "65 GFLOP/s and 50 GFLOP/s (measured, at every start its own)" in table
    assert "the first 3 after each" not in section(markdown, "Result")
    parts = section(markdown, "Time and FLOPs by part of a step")
    assert "| read | 100 ms | 25.0% |" in parts
    assert "mean of the 4 profiled steps" in parts
    assert "Mean of 4 steps." in page.text
    facts = section(markdown, "Run")
    assert "| started | 2026-01-05T10:00:00+00:00 |" in facts
    assert "| resumed | from step 30 at 2026-01-06T10:00:00+00:00 |" in facts
    assert "| time since it was last resumed | 1 min 39 s |" in facts
    assert "whole run" not in facts
    tile = page.text.index("samples/s, median step")
    assert page.text[:tile].endswith("2.5 k")


def test_every_command_of_a_resumed_run_is_shown_in_order(make_run: MakeRun) -> None:
    page, _, markdown = report(resumed_run(make_run))
    commands = (
        "gemline train --recipe synthetic_cpu --data data/synthetic --train.seed 3\n"
        "# resumed from step 30:\n"
        "gemline train --resume --run-dir runs/a"
    )
    for text in (page.text, markdown):
        after = text.split("Repeat this run", 1)[1]
        assert commands in after
        assert "each line went on from the last" in after


def test_undefined_values_are_shown_as_such(make_run: MakeRun) -> None:
    run = make_run(tasks=("click",), steps=20)

    def one_class(record: dict) -> dict:
        if record["kind"] == "eval":
            record["tasks"]["click"] |= {"ne": None, "auc": None, "gauc": None}
        if record["kind"] == "train":
            record |= {"mfu": None, "window_ne": {"click": None}}
        return record | ({"peak_flops_per_s": None} if record["kind"] == "start" else {})

    edit(run, one_class)
    columns = {"label.click": np.zeros(9), "prediction.click": np.linspace(0.1, 0.2, 9)}
    pq.write_table(pa.table(columns), run / "predictions-20.parquet")
    page, _, markdown = report(run)
    row = page.cells[page.cells.index("model: click") :][:8]
    assert row == ["model: click", "undefined", "undefined", "undefined", "1.0120", "0.5300", "0.3000", "20,000"]
    assert "| model: click | undefined | undefined |" in markdown
    assert "click is undefined: all labels with weight are 0" in page.text
    assert "Neither a train record nor an eval record holds an NE." in page.text
    assert "so MFU is undefined" in page.text


@pytest.mark.parametrize("kept", [0, 1, 21, 43])
def test_a_run_that_crashed_anywhere_still_has_a_report(make_run: MakeRun, kept: int) -> None:
    """The job died after `kept` records and in the middle of the next; nothing was written after that."""
    run = make_run(steps=40)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:kept]) + lines[kept][:25])
    for path in run.glob("predictions-*"):
        path.unlink()
    page, text, markdown = report(run)
    assert "not finished" in page.text
    assert "no end record" in page.text
    assert "no end record" in markdown
    assert f"line {kept + 1} is cut off" in page.text
    assert ("no eval record" in page.text) == (kept <= 21)
    assert ('aria-label="Training loss"' in text) == (kept > 1)


def test_only_a_command_is_left(tmp_path: Path) -> None:
    (tmp_path / "command.txt").write_text("gemline train\n")
    page, text, _ = report(tmp_path)
    assert "metrics.jsonl is missing" in page.text
    assert "config.json is missing" in page.text
    assert "gemline train" in page.text
    assert "<svg" not in text


def test_predictions_that_were_cut_are_noted(make_run: MakeRun) -> None:
    run = make_run(steps=20)
    path = run / "predictions-20.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    page, text, _ = report(run)
    assert "The predictions cannot be read" in page.text
    assert "predictions-20.parquet" in page.text
    assert 'aria-label="Training loss"' in text


def test_predictions_that_are_no_probabilities_are_noted(make_run: MakeRun) -> None:
    run = make_run(tasks=("click",), steps=20)
    columns = {"label.click": np.array([0.0, 1, 1]), "prediction.click": np.array([0.1, np.nan, 0.9])}
    pq.write_table(pa.table(columns), run / "predictions-20.parquet")
    assert "1 of 3 rows of task 'click' have a prediction outside [0, 1]" in report(run)[0].text


def test_rows_of_weight_0_are_told_apart_in_the_captions(make_run: MakeRun) -> None:
    run = make_run(tasks=("click",), steps=20)
    weight = np.ones(1500)
    weight[:1200] = 0
    chance = np.linspace(0.1, 0.9, 1500)
    columns = {"label.click": np.arange(1500) % 2.0, "prediction.click": chance, "weight.click": weight}
    pq.write_table(pa.table(columns), run / "predictions-20.parquet")
    page, text, _ = report(run)
    assert "15 bins with about equal numbers of rows (20 to 20)" in page.text
    assert page.text.count("1,200 rows of weight 0 count nowhere.") == 2, "under calibration and ROC"
    assert "What is missing" not in text, "open labels are nothing odd"


def test_html_and_markdown_show_the_same_tables(completed: tuple[Page, str, str]) -> None:
    page, _, markdown = completed
    cells = []
    for line in markdown.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            cells += [cell.strip().replace("\\", "") for cell in line.strip("|").split("|")]
    for cell in page.cells:
        assert cell in cells, cell


def test_a_large_run_stays_small(make_run: MakeRun) -> None:
    tasks = tuple(f"a task with a rather long name {index}" for index in range(9))
    page, text, _ = report(make_run(tasks=tasks, steps=3000, rows=50_000))
    assert len(text) < 1_500_000
    assert "The first 6 of 10 series are drawn." in page.text
    assert page.text.count("model: a task with a rather long name") == 9


def test_one_step_is_enough(make_run: MakeRun) -> None:
    page, text, _ = report(make_run(steps=1, rows=1))
    assert 'aria-label="Training loss"' in text
    assert "no eval record" in page.text


def test_a_broken_line_leaves_the_old_report(completed_run: Path, completed: object, tmp_path: Path) -> None:
    run = shutil.copytree(completed_run, tmp_path / "run")
    old = {path.name: path.read_bytes() for path in run.glob("report*")}
    assert len(old) == 2
    (run / "metrics.jsonl").write_text('{"kind": \n{"kind": "start"}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1"):
        write_report(run)
    assert {path.name: path.read_bytes() for path in run.glob("report*")} == old


def test_numbers_in_figures_are_not_cut() -> None:
    """Path coordinates lose digits to save bytes; text does not."""
    panel = drawing.draw("x", "t", "", lambda figure: figure.subplots().set_title("0.123456"))
    assert "0.123456" in panel.svg
    assert re.search(r' d="[^"]*\d\.\d{3}', panel.svg) is None
