"""A plan as a picture: ranks on their hosts, coloured by the groups of each axis, and the step's time by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gem_comm.api import layout

from gem_pipelines.errors import ConfigError
from gem_pipelines.planner.search import AXES, Plan
from gem_pipelines.planner.text import mesh_text, seconds_text

MOST_HOSTS = 8


def draw_plan(plan: Plan, path: Path) -> Path:
    """Write an SVG or PNG, by the file's suffix."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--picture {path}: expected a name that ends in .svg or .png")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    figure.suptitle(
        f"{plan.workload.name} on {plan.world_size} ranks of {plan.topology.name}: {mesh_text(plan.chosen.spec)}\n"
        "predictions of a model, not measurements"
    )
    above, below = figure.subfigures(2, 1, height_ratios=[1.2, 1])
    _ranks(plan, above)
    _bars(plan, below.subplots())
    with rc_context({"svg.fonttype": "none"}):  # text as text: it can be searched, and the file is small
        figure.savefig(path)
    return path


def _ranks(plan: Plan, figure: Any) -> None:
    placed = layout(plan.chosen.spec, plan.topology)
    per_host = plan.topology.tiers[0].group_size or plan.world_size
    hosts = min(MOST_HOSTS, -(-plan.world_size // per_host))
    shown = min(plan.world_size, hosts * per_host)
    axes = figure.subplots(1, len(AXES))
    for axis, plot in zip(AXES, axes, strict=True):
        group_of = {rank: number for number, group in enumerate(placed.groups[axis]) for rank in group}
        for rank in range(shown):
            x, y = rank % per_host, rank // per_host
            colour = f"C{group_of[rank] % 10}"
            plot.add_patch(_square(x, -y, colour))
            if per_host <= 16:
                plot.text(x + 0.45, -y + 0.45, str(rank), ha="center", va="center", fontsize=6)
        size = getattr(plan.chosen.spec, axis)
        plot.set_title(f"{axis}: {plan.world_size // size} groups of {size}\n{placed.tiers[axis]}", fontsize=9)
        plot.set_xlim(-0.2, per_host + 0.1)
        plot.set_ylim(-hosts + 0.9, 1.1)
        plot.set_axis_off()
    rest = "" if shown == plan.world_size else f" (first {hosts} of {-(-plan.world_size // per_host)})"
    figure.suptitle(f"one row a {plan.topology.tiers[0].name}{rest}; ranks of one colour are a group", fontsize=9)


def _square(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), 0.9, 0.9, facecolor=colour, alpha=0.6)


def _bars(plan: Plan, plot: Any) -> None:
    found = [plan.chosen, *plan.runners_up[:4]]
    left = [0.0] * len(found)
    for part in plan.chosen.seconds:
        widths = [estimate.seconds[part] * 1e3 for estimate in found]
        plot.barh(range(len(found)), widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, (estimate, end) in enumerate(zip(found, left, strict=True)):
        plot.text(
            end, row, " " + seconds_text(estimate.step_s) + ("" if estimate.fits else " (does not fit)"), va="center"
        )
    plot.set_yticks(range(len(found)), [mesh_text(estimate.spec) for estimate in found], fontsize=8)
    plot.invert_yaxis()
    plot.margins(x=0.12)
    plot.set_xlabel("predicted step time, ms")
    plot.figure.legend(ncols=7, fontsize=8, loc="outside lower center")
