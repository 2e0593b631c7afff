"""The HTML page: one file, no script, nothing from the network. Every text from the run passes through `html.escape`.

A figure's colours are CSS variables set here for light and dark, so the page follows the reader's system setting.
"""

from __future__ import annotations

import html

from gem_pipelines.report.drawing import SERIES, Panel
from gem_pipelines.report.facts import Table, command_note, recipe_name, status
from gem_pipelines.report.run_data import RunData

_DARK_SERIES = ("#5ab4f0", "#ff8a4c", "#3fd0a0", "#e9a3c9", "#8fd0f7", "#f2c14e")

_CSS = """
:root {
  color-scheme: light dark;
  --page: #f4f5f7; --card: #ffffff; --ink: #1c2127; --soft: #59626d; --grid: #dde1e6; --edge: #d5dae0;
  --good: #0b6b4d; --good-page: #d9f2e8; --warn: #7a4a00; --warn-page: #fdf0d5; --link: #0b5cad;
  LIGHT
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1d2126; --ink: #e6e9ed; --soft: #a3adb8; --grid: #363c44; --edge: #363c44;
    --good: #8be0bd; --good-page: #123a2c; --warn: #f5cf8b; --warn-page: #3d2e10; --link: #84bdf5;
    DARK
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 2px; overflow-wrap: anywhere; }
p { margin: 0 0 12px; }
.soft, figcaption, .note { color: var(--soft); font-size: .875rem; overflow-wrap: anywhere; }
.pill { display: inline-block; border-radius: 999px; padding: 1px 12px; font-size: .875rem; font-weight: 600;
  background: var(--warn-page); color: var(--warn); vertical-align: middle; }
.pill.completed { background: var(--good-page); color: var(--good); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 16px; min-width: 0; }
.missing { border-color: var(--warn); background: var(--warn-page); margin: 16px 0; }
.missing ul { margin: 6px 0 0; padding-left: 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 12px; margin: 18px 0 0; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; margin: 8px 0; color: var(--ink); }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
.absent { color: var(--warn); padding: 24px 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--edge); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td { overflow-wrap: anywhere; min-width: 4.5em; }
td:first-child { min-width: 9em; }
tr:last-child td { border-bottom: 0; }
details.card { margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .875rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
@media (max-width: 600px) { main { padding: 16px 10px 32px; } .card { padding: 12px 10px; } }
@media print { body { background: none; } .card { break-inside: avoid; } }
"""


def render_page(
    run: RunData,
    *,
    tables: tuple[Table, ...],
    panels: tuple[Panel, ...],
    tiles: tuple[tuple[str, str], ...],
    notes: tuple[str, ...],
) -> str:
    """The whole page. `tiles` are (label, value) pairs shown large on top; `notes` say what is missing."""
    title = f"Gemline run: {recipe_name(run)}"
    open_tables = [table for table in tables if not table.folded]
    folded = [table for table in tables if table.folded]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title>",
        f"<style>{_style()}</style></head><body><main>",
        f'<h1>{_text(title)} <span class="pill {_pill(run)}">{_text(status(run))}</span></h1>',
        f'<p class="soft">{_text(run.directory.name)}, {run.last_step:,} steps</p>',
        _notes(notes),
        _tiles(tiles),
        *(_table_section(table) for table in open_tables[1:2]),
        '<h2>Figures</h2><div class="grid">',
        *(_figure(panel) for panel in panels),
        "</div>",
        *(_table_section(table) for table in (*open_tables[:1], *open_tables[2:])),
        "<h2>Details</h2>",
        *(_folded(table) for table in folded),
        "<h2>Repeat this run</h2>",
        _command(run),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _style() -> str:
    light = " ".join(f"--series-{index}: {colour};" for index, colour in enumerate(SERIES))
    dark = " ".join(f"--series-{index}: {colour};" for index, colour in enumerate(_DARK_SERIES))
    return _CSS.replace("LIGHT", light).replace("DARK", dark)


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _pill(run: RunData) -> str:
    return "completed" if status(run) == "completed" else "other"


def _notes(notes: tuple[str, ...]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return f'<div class="card missing" role="note"><b>What is missing or odd in this run</b><ul>{items}</ul></div>'


def _tiles(tiles: tuple[tuple[str, str], ...]) -> str:
    cells = "".join(
        f'<div class="card tile"><b>{_text(value)}</b><span>{_text(label)}</span></div>' for label, value in tiles
    )
    return f'<div class="tiles">{cells}</div>' if tiles else ""


def _figure(panel: Panel) -> str:
    body = panel.svg if panel.svg else f'<div class="absent">{_text(panel.problem or "")}</div>'
    caption = f"<figcaption>{_text(panel.caption)}</figcaption>" if panel.caption else ""
    return f'<figure class="card"><h3>{_text(panel.title)}</h3>{body}{caption}</figure>'


def _table(table: Table) -> str:
    def cell(tag: str, index: int, value: str) -> str:
        style = ' class="number"' if index in table.numeric else ""
        return f"<{tag}{style}>{_text(value)}</{tag}>"

    head = "".join(cell("th", index, name) for index, name in enumerate(table.headers))
    lines = ("".join(cell("td", index, value) for index, value in enumerate(row)) for row in table.rows)
    rows = "".join(f"<tr>{line}</tr>\n" for line in lines)
    note = f'<p class="note">{_text(table.note)}</p>' if table.note else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>{note}'


def _table_section(table: Table) -> str:
    return f'<h2>{_text(table.title)}</h2><div class="card">{_table(table)}</div>'


def _folded(table: Table) -> str:
    return f'<details class="card"><summary>{_text(table.title)} ({len(table.rows)})</summary>{_table(table)}</details>'


def _command(run: RunData) -> str:
    if not run.command:
        return '<div class="card absent">The run directory has no command.txt.</div>'
    note = f'<p class="note">{_text(command_note(run))}</p>' if command_note(run) else ""
    return f'<div class="card"><pre>{_text(run.command)}</pre></div>{note}'
