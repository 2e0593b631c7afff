"""A plan in words and numbers: what `gemline plan` prints, and the same as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gem_comm.api import layout
from gem_comm.interface import Layout, MeshSpec
from rich.console import Console, Group, RenderableType
from rich.table import Table

from gem_pipelines.planner.estimate import Estimate, axis_strides
from gem_pipelines.planner.moves import bytes_by_axis
from gem_pipelines.planner.scaling import STRATEGIES, Point, breakdown
from gem_pipelines.planner.search import AXES, Plan

NOTE = "Predictions of a model, not measurements. Assumed: "


def mesh_text(spec: MeshSpec) -> str:
    """Example: "shard 8, table_shard 4, table_replica 2 (fully sharded)"; axes of size 1 are left out."""
    axes = [f"{axis} {getattr(spec, axis)}" for axis in AXES if getattr(spec, axis) > 1]
    return (", ".join(axes) or "one rank") + (" (fully sharded)" if spec.fully_sharded else "")


def size_text(count: float) -> str:
    """Example: 1_500_000 is "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """Example: 0.0123 is "12.3 ms"."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def print_plan(plan: Plan, console: Console, *, ranks: int = 16, runners_up: int = 4) -> None:
    """Everything about a plan, for a terminal."""
    console.print(_head(plan))
    for table in (_ranks_table(plan, ranks), _moves_table(plan), _parts_table(plan, runners_up), _memory_table(plan)):
        console.print(table)
    console.print(explain(plan))
    console.print(NOTE + assumptions_text(plan), highlight=False)


def assumptions_text(plan: Plan) -> str:
    values = dataclasses.asdict(plan.assumptions)
    given = ", ".join(f"{name} {value if isinstance(value, str) else f'{value:g}'}" for name, value in values.items())
    return f"{given}. Topology {plan.topology.name}: {plan.topology.source or 'no source given'}. Workload: " + (
        plan.workload.source or "no source given"
    )


def explain(plan: Plan) -> str:
    """Why the chosen mesh: against the runner-up, and against meshes that differ in one decision."""
    own = plan.chosen
    lines = [f"Chosen of {len(plan.ranked)} meshes: {mesh_text(own.spec)}, {seconds_text(own.step_s)} a step."]
    if not own.fits:
        lines[0] += f" It does not fit: {size_text(own.memory_bytes)} of {size_text(own.memory_limit)} a rank. " + (
            "Nothing of this world size does." if not any(e.fits for e in plan.ranked) else "Others do."
        )
    for label, other in _contrasts(plan):
        lines.append(f"  {label}: {mesh_text(other.spec)}: {difference(own, other)}")
    return "\n".join(lines)


def difference(own: Estimate, other: Estimate) -> str:
    """How `other` compares, by the part that differs most."""
    if not other.fits:
        part = max(other.memory, key=lambda name: other.memory[name] - own.memory.get(name, 0.0))
        return f"does not fit ({size_text(other.memory_bytes)}; most in {part}, {size_text(other.memory[part])})"
    gap = other.step_s - own.step_s
    part = max(own.seconds, key=lambda name: abs(other.seconds[name] - own.seconds[name]))
    change = other.seconds[part] - own.seconds[part]
    word = "slower" if gap >= 0 else "faster"
    percent = abs(gap) / own.step_s
    if percent < 0.0005:
        return "the same within 0.05 %"
    return f"{percent:.1%} {word}, mostly {part} {seconds_text(abs(change))} {'more' if change >= 0 else 'less'}"


def _contrasts(plan: Plan) -> list[tuple[str, Estimate]]:
    """The runner-up, and the best mesh that decides one thing the other way."""
    own = plan.chosen.spec
    questions = (
        ("runner-up", lambda s: True),
        ("other expert axis", lambda s: s.expert != own.expert),
        ("tables over all ranks", lambda s: s.table_replica == 1 and own.table_replica > 1),
        ("copies of tables", lambda s: s.table_replica > 1 and own.table_replica == 1),
        ("other way to keep copies", lambda s: s.table_replica > 1 and s.fully_sharded != own.fully_sharded),
        ("dense sharded over all ranks", lambda s: s.replicate == 1 and own.replicate > 1),
        ("dense copied on every rank", lambda s: s.shard * s.expert == 1 and own.shard * own.expert > 1),
    )
    found: list[tuple[str, Estimate]] = []
    for label, wanted in questions:
        other = next((e for e in plan.runners_up if wanted(e.spec)), None)
        if other is not None and all(other is not known for _, known in found):
            found.append((label, other))
    return found


def _head(plan: Plan) -> str:
    work = plan.workload
    return (
        f"{work.name} on {plan.world_size} ranks of {plan.topology.name}: {work.dense_parameters:,} dense and "
        f"{work.table_parameters:,} table parameters, {work.batch} samples a rank and step"
    )


def _ranks_table(plan: Plan, most: int) -> RenderableType:
    placed = layout(plan.chosen.spec, plan.topology)
    table = Table(title="Which rank sits where", title_justify="left")
    host = plan.topology.tiers[0].group_size or plan.world_size
    for column in ("rank", plan.topology.tiers[0].name, *AXES):
        table.add_column(column, justify="right")
    for rank in _shown(plan.world_size, most):
        where = placed.coordinate(rank)
        table.add_row(str(rank), str(rank // host), *(str(where[axis]) for axis in AXES))
    axes = Table(title="Groups of each axis", title_justify="left")
    for column in ("axis", "ranks", "groups", "slowest tier", "group of rank 0"):
        axes.add_column(column)
    for axis, (size, stride) in sorted(axis_strides(plan.chosen.spec).items()):
        axes.add_row(axis, str(size), str(plan.world_size // size), placed.tiers[axis], _members(size, stride))
    hidden = plan.world_size - min(plan.world_size, most)
    return Group(table, f"  ... and {hidden} more (--json has all)" if hidden else "", axes)


def _members(size: int, stride: int) -> str:
    shown = [str(i * stride) for i in range(min(size, 4))]
    return " ".join(shown) + (f" ... {(size - 1) * stride}" if size > 4 else "")


def _shown(world: int, most: int) -> range:
    return range(min(world, most))


def _moves_table(plan: Plan) -> Table:
    table = Table(title="What moves in a step (bytes that one rank sends)", title_justify="left")
    for column in ("axis", "collective", "bytes", "tier", "time", "hidden"):
        table.add_column(column, no_wrap=column != "collective")
    placed = layout(plan.chosen.spec, plan.topology)
    for row in _grouped_moves(plan.chosen):
        table.add_row(
            row["axis"],
            f"{row['calls']:g} x {row['kind']} of {row['what']}",
            size_text(row["bytes"]),
            placed.tiers[row["axis"]],
            seconds_text(row["seconds"]),
            "yes" if row["hidden"] else "no",
        )
    return table


def _grouped_moves(found: Estimate) -> list[dict[str, Any]]:
    """Moves of all units together, by axis, kind and what they are about."""
    grouped: dict[tuple[str, str, str], dict[str, Any]] = {}
    for move, seconds in found.moved:
        what = move.what.partition(" of ")[0]
        entry = grouped.setdefault(
            (move.axis, move.kind, what),
            {"axis": move.axis, "kind": move.kind, "what": what, "calls": 0.0, "bytes": 0.0, "seconds": 0.0}
            | {"hidden": move.hidden},
        )
        entry["calls"] += move.calls
        entry["bytes"] += move.sent
        entry["seconds"] += seconds
    return list(grouped.values())


def _parts_table(plan: Plan, runners_up: int) -> Group:
    """Parts as rows and meshes as numbered columns, so that 80 columns hold it; the meshes by number below."""
    meshes = (plan.chosen, *plan.runners_up[:runners_up])
    table = Table(title="Step time", title_justify="left")
    table.add_column("part")
    for number, _ in enumerate(meshes):
        table.add_column(f"{number + 1}" + (" *" if number == 0 else ""), justify="right", no_wrap=True)
    table.add_row("step", *(seconds_text(found.step_s) for found in meshes))
    for part in plan.chosen.seconds:
        table.add_row(part, *(seconds_text(found.seconds[part]) for found in meshes))
    table.add_row("memory", *(size_text(found.memory_bytes) + ("" if found.fits else " (!)") for found in meshes))
    return Group(table, *(f"  {number + 1}: {mesh_text(found.spec)}" for number, found in enumerate(meshes)))


def _memory_table(plan: Plan) -> Table:
    limit = plan.chosen.memory_limit
    table = Table(title=f"Memory of the fullest rank (limit {size_text(limit)})", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    for part, count in plan.chosen.memory.items():
        table.add_row(part, size_text(count))
    if plan.chosen.recomputed:
        table.add_row("activations recomputed", f"{plan.chosen.recomputed:.0%}")
    return table


def scaling_table(points: Sequence[Point]) -> Table:
    """Rate a rank of each strategy, relative to the best fitting one."""
    table = Table(title="Samples a second and rank, share of the best", title_justify="left")
    table.add_column("ranks", justify="right")
    for strategy in STRATEGIES:
        table.add_column(strategy)
    best = max((p.rate for p in points if p.best.fits), default=1.0)
    for world in sorted({p.world_size for p in points}):
        cells = []
        for strategy in STRATEGIES:
            point = next(p for p in points if p.strategy == strategy and p.world_size == world)
            spec = point.best.spec
            tables = f"{spec.table_shard} x {spec.table_replica}"
            cells.append(f"{point.rate / best:.2f}  ({tables})" if point.best.fits else f"does not fit ({tables})")
        table.add_row(f"{world:,}", *cells)
    return table


def scaling_text(points: Sequence[Point]) -> str:
    """Where each strategy breaks down."""
    return "\n".join(breakdown(points, strategy) for strategy in STRATEGIES)


def plan_json(plan: Plan, *, runners_up: int = 10) -> dict[str, Any]:
    """Everything, for programs."""
    placed = layout(plan.chosen.spec, plan.topology)
    return {
        "workload": plan.workload.name,
        "topology": plan.topology.name,
        "world_size": plan.world_size,
        "assumptions": dataclasses.asdict(plan.assumptions),
        "chosen": estimate_json(plan.chosen),
        "explanation": explain(plan),
        "runners_up": [estimate_json(found) for found in plan.runners_up[:runners_up]],
        "meshes": len(plan.ranked),
        "layout": layout_json(placed),
    }


def estimate_json(found: Estimate) -> dict[str, Any]:
    moves = [{**dataclasses.asdict(move), "seconds": seconds} for move, seconds in found.moved]
    return {
        "mesh": dataclasses.asdict(found.spec),
        "step_s": found.step_s,
        "seconds": found.seconds,
        "memory_bytes": found.memory,
        "memory_limit_bytes": found.memory_limit,
        "fits": found.fits,
        "recomputed": found.recomputed,
        "bytes_by_axis": bytes_by_axis(tuple(move for move, _ in found.moved)),
        "moves": moves,
    }


def layout_json(placed: Layout) -> dict[str, Any]:
    return {"tiers": dict(placed.tiers), "groups": {axis: [list(g) for g in gs] for axis, gs in placed.groups.items()}}
