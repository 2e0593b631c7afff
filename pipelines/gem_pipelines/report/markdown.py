"""The same tables as the page, as Markdown: for a terminal, a pull request or a diff. Figures are in the page only."""

from __future__ import annotations

import re

from gem_pipelines.report.facts import Table, command_note, recipe_name, status
from gem_pipelines.report.run_data import RunData


def render_markdown(run: RunData, *, tables: tuple[Table, ...], notes: tuple[str, ...]) -> str:
    """The report as Markdown."""
    lines = [f"# Gemline run: {_cell(recipe_name(run))}", ""]
    lines += [f"{_cell(run.directory.name)}, {run.last_step:,} steps, {_cell(status(run))}", ""]
    if notes:
        lines += ["## What is missing or odd in this run", "", *(f"- {_cell(note)}" for note in notes), ""]
    for table in tables:
        lines += _table(table)
    lines += ["## Repeat this run", ""]
    if run.command:
        lines += _code(run.command)
        if command_note(run):
            lines += [_cell(command_note(run)), ""]
    else:
        lines += ["The run directory has no command.txt.", ""]
    return "\n".join(lines)


def _table(table: Table) -> list[str]:
    rule = ["---:" if index in table.numeric else "---" for index in range(len(table.headers))]
    lines = [f"## {_cell(table.title)}", "", _row(map(_cell, table.headers)), _row(rule)]
    lines += [_row(map(_cell, row)) for row in table.rows]
    lines.append("")
    if table.note:
        lines += [_cell(table.note), ""]
    return lines


def _row(cells: object) -> str:
    return "| " + " | ".join(cells) + " |"  # type: ignore[arg-type]


def _cell(text: str) -> str:
    """Text that Markdown shows as it is: one line, no markup, no HTML."""
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|])|(?<!\w)(_)|(_)(?!\w)", lambda match: "\\" + match.group(0), text)


def _code(text: str) -> list[str]:
    """A fenced block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, text, fence, ""]
