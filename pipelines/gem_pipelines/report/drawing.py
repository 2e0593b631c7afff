"""From a matplotlib figure to SVG that belongs in a page: themed by CSS, small, and the same bytes for the same run.

Colours: matplotlib draws with the hex values below, and `to_svg` replaces each by a CSS variable, so that one figure
reads well on light and dark pages. The series colours follow the Okabe-Ito set, which people with the common kinds of
colour blindness can tell apart; every series also differs in its dashes, so that colour is never the only mark.
Text stays text (svg.fonttype none): readable by screen readers, selectable, and a tenth of the bytes of outlines.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK = "#0a0b0c"
GRID = "#0a0b0d"
PAGE = "#0a0b0e"
# Written as values of their own, so that replacing them cannot touch anything else in the file.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1)), (0, (8, 2)))
CSS_COLOURS = {INK: "var(--ink)", GRID: "var(--grid)", PAGE: "var(--card)"} | {
    colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)
}
MAX_SERIES = len(SERIES)
MAX_POINTS = 400

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gemline",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "path.simplify": True,
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One figure of the page: `svg`, or `problem` saying why there is none."""

    title: str
    caption: str
    svg: str | None = None
    problem: str | None = None


def draw(identity: str, title: str, caption: str, paint: Callable[[Figure], None], *, height: float = 3.1) -> Panel:
    """Runs `paint` on a new figure, 4.7 x `height` inches, and returns the panel. `identity` prefixes its SVG ids."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.7, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure)
        return Panel(title=title, caption=caption, svg=to_svg(figure, identity, title))


def to_svg(figure: Figure, identity: str, title: str) -> str:
    """The figure as an inline <svg> element: a text alternative, CSS colours, and ids that are unique on the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.DOTALL)  # its style would rule the whole page
    text = re.sub(r'\bid="([^"]*)"', rf'id="{identity}-\1"', text)
    text = re.sub(r'href="#([^"]*)"', rf'href="#{identity}-\1"', text)
    text = re.sub(r"url\(#([^)]*)\)", rf"url(#{identity}-\1)", text)
    # A hundredth of a point is finer than a pixel. Only inside tags: the text between them is read by people.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag.group(0)), text)
    for colour, variable in CSS_COLOURS.items():
        text = text.replace(colour, variable)
    text = re.sub(r"\n\s*", "\n", text)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups()  # type: ignore[union-attr]
    label = html.escape(title, quote=True)
    names = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
    head = f'<svg viewBox="0 0 {width} {height}" {names} role="img" aria-label="{label}">'
    return head + text[text.index(">") + 1 :].strip()


def shorten(name: str, limit: int = 26) -> str:
    """A name that fits a legend."""
    name = " ".join(str(name).split())
    return name if len(name) <= limit else name[: limit - 3] + "..."


def axis_number(value: float, _position: int = 0) -> str:
    """A short tick label: 1234567 -> 1.23M."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def count_axis(axis: Any) -> None:
    """Ticks for a quantity: few, with k, M, G."""
    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(axis_number))


def step_axis(axes: Axes, label: str = "step") -> None:
    """The x axis of steps: whole numbers."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(axis_number))


def thin(
    x: np.ndarray, y: np.ndarray, points: int = MAX_POINTS, *, reduce: Callable[[np.ndarray], Any] = np.mean
) -> tuple[np.ndarray, np.ndarray]:
    """At most about `points` points: means (`reduce`) of equal runs of neighbours; undefined values are left out."""
    good = np.isfinite(y)
    x, y = x[good].astype(np.float64), y[good]
    if len(x) <= points:
        return x, y
    runs = np.array_split(np.arange(len(x)), points)
    return np.array([x[run].mean() for run in runs]), np.array([reduce(y[run]) for run in runs])
