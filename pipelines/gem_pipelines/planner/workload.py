"""A training step as numbers: dense units with their parameter shapes, tables with their lookups, floating-point work.

A *unit* is what FSDP2 gathers and frees as one. `units_of` cuts a model into them, and parallelize.py wraps the same
modules, so that what is planned is what runs: each layer is a unit, the rest is the root. The members of a DHEN layer,
and those of WukongExperts, are experts: with expert parallelism each is a unit of its own on the experts' mesh, and no
part of its layer's unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from gem_pipelines.errors import ConfigError
from gem_pipelines.model.dhen import Dhen
from gem_pipelines.model.wukong import WukongExperts

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ExpertGroup:
    """Experts of one unit.

    shapes       parameter shapes of each expert
    in_elements  numbers a sample that go in, and
    out_elements numbers a sample that come out
    parts        numbers a sample that each expert reads, where each reads its own part and outputs, equally large, are
                 concatenated; empty: every expert reads everything and outputs are summed
    """

    shapes: tuple[tuple[Shape, ...], ...]
    in_elements: int
    out_elements: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One FSDP unit. root: gathered once a step instead of twice. experts: kept out of `shapes`."""

    name: str
    shapes: tuple[Shape, ...]
    experts: ExpertGroup | None = None
    root: bool = False


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """One table: rows and dim; per sample, ids that are looked up and vectors that leave (fewer than ids when pooled);
    features: keys that look it up."""

    name: str
    rows: int
    dim: int
    ids: float
    vectors: float
    features: int = 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one step does.

    batch             samples of one rank and step
    forward_flops, backward_flops   a sample
    flops_spread      standard deviation of a sample's FLOPs over their mean: lengths differ
    activation_bytes  saved for backward, a sample, without recomputation
    gather_bytes, reduce_bytes, activation_number_bytes, vector_bytes   bytes of one parameter as gathered, one gradient
                      as reduced, one activation, one number of an embedding vector, as they travel
    root_gather_bytes  of one parameter of the root unit as gathered; None: gather_bytes
    source            where these figures come from
    """

    name: str
    units: tuple[Unit, ...]
    tables: tuple[TableLoad, ...]
    batch: int
    forward_flops: float
    backward_flops: float
    flops_spread: float
    activation_bytes: float
    gather_bytes: int = 4
    reduce_bytes: int = 4
    activation_number_bytes: int = 4
    vector_bytes: int = 4
    root_gather_bytes: int | None = None
    source: str = ""

    @property
    def experts(self) -> int:
        """How many experts the units have (the greatest common divisor, 1 without): what `expert` can divide."""
        counts = [len(unit.experts.shapes) for unit in self.units if unit.experts is not None]
        return math.gcd(*counts) if counts else 1

    @property
    def dense_parameters(self) -> int:
        own = sum(count_of(unit.shapes) for unit in self.units)
        return own + sum(count_of(e) for unit in self.units if unit.experts for e in unit.experts.shapes)

    @property
    def table_parameters(self) -> int:
        return sum(table.rows * table.dim for table in self.tables)


def count_of(shapes: Sequence[Shape]) -> int:
    """Numbers in all."""
    return sum(math.prod(shape) for shape in shapes)


def padded_shard(shapes: Sequence[Shape], ranks: int) -> int:
    """Numbers that one of `ranks` ranks keeps: FSDP2 cuts dim 0 of each parameter and fills up the last part.

    Example: shapes (5, 3) and (4,) over 2 ranks: 3 * 3 + 2 = 11.
    """
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def units_of(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """(name, module) of every unit below the root, in forward order: the layers."""
    return tuple((f"layers.{index}", layer) for index, layer in enumerate(model.layers))


def experts_of(layer: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """(name within the layer, module) of the layer's experts; empty where it has none."""
    interaction = layer.interaction
    if isinstance(interaction, Dhen):
        return tuple((f"interaction.members.{name}", member) for name, member in interaction.members.items())
    if isinstance(interaction, WukongExperts):
        return tuple((f"interaction.experts.{number}", expert) for number, expert in enumerate(interaction.experts))
    return ()


def _parts_of(layer: nn.Module, in_elements: int) -> tuple[int, ...]:
    """Numbers a sample that each expert of a WukongExperts reads; empty for a DHEN."""
    if not isinstance(layer.interaction, WukongExperts):
        return ()
    tokens = layer.interaction.experts.parts
    return tuple(part * in_elements // sum(tokens) for part in tokens)


def owned_experts(count: int, expert_axis: int, coordinate: int) -> range:
    """Experts of the rank at `coordinate` on the expert axis: neighbours, equally many each.

    Example: owned_experts(6, 2, 1) is range(3, 6). ConfigError where they cannot be divided.
    """
    if count % expert_axis:
        raise ConfigError(
            f"{count} experts cannot be divided over expert={expert_axis}; use a divisor of {count}, or other members"
        )
    each = count // expert_axis
    return range(coordinate * each, (coordinate + 1) * each)


def shapes_of(module: nn.Module) -> tuple[Shape, ...]:
    return tuple(tuple(parameter.shape) for parameter in module.parameters())


def dense_units(model: nn.Module, *, in_out: Sequence[tuple[int, int]] = ()) -> tuple[Unit, ...]:
    """Units of a GemModel. in_out: input and output numbers a sample of each layer's interaction."""
    units, inside = [], set()
    for index, (name, layer) in enumerate(units_of(model)):
        members = experts_of(layer)
        of_experts = {id(p) for _, member in members for p in member.parameters()}
        shapes = tuple(tuple(p.shape) for p in layer.parameters() if id(p) not in of_experts)
        group = None
        if members:
            in_elements, out_elements = in_out[index]
            group = ExpertGroup(
                shapes=tuple(shapes_of(member) for _, member in members),
                in_elements=in_elements,
                out_elements=out_elements,
                parts=_parts_of(layer, in_elements),
            )
        units.append(Unit(name=name, shapes=shapes, experts=group))
        inside |= {id(p) for p in layer.parameters()}
    rest = tuple(tuple(p.shape) for p in model.parameters() if id(p) not in inside)
    return (*units, Unit(name="root", shapes=rest, root=True))
