"""gemline plan"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gem_pipelines.cli.parser import Parser
from gem_pipelines.errors import ConfigError, did_you_mean
from gem_pipelines.recipes import RECIPES

EPILOG = """\
Workloads beside the recipes: gem_like_100b, gem_like_1t (assumed sizes). Topologies beside files: h200_cluster,
h200_pair, laptop. Configuration overrides (--data.global_batch_size 4096, ...) apply to recipes.

  gemline plan --topology h200_cluster --recipe gem_like_1t --world 1024
  gemline plan --topology mine.toml --recipe debug --world 8 --mesh expert=2,shard=4,table_shard=8 --picture plan.svg
  gemline plan --topology h200_cluster --recipe gem_like_1t --scaling
"""


def main(arguments: Sequence[str]) -> int:
    """Explain which mesh a cluster deserves."""
    parser = Parser(
        prog="gemline plan",
        description="Choose and explain a mesh for a cluster you may not have: bytes, memory and step time are "
        "predictions of a model.",
        epilog=EPILOG,
    )
    parser.add_argument("--topology", required=True, help="a TOML file, or the name of a shipped topology")
    parser.add_argument("--recipe", required=True, help=f"one of {', '.join(RECIPES)}, or a workload below")
    parser.add_argument("--world", type=int, help="how many ranks")
    parser.add_argument("--mesh", help="explain this mesh instead of the best, e.g. shard=4,table_shard=4")
    parser.add_argument(
        "--table-sync",
        choices=("gradients", "average"),
        help="how copies of tables are kept equal (default: as the recipe says; average for other workloads)",
    )
    parser.add_argument("--sync-every", type=int, default=1, help="steps between averages of plain table copies")
    parser.add_argument(
        "--host-ms",
        type=float,
        nargs=3,
        metavar=("STEP", "CALL", "UNIT"),
        default=(0.0, 0.0, 0.0),
        help="measured host time of a step on one rank, of issuing a collective, of a unit of FSDP2 (default: none)",
    )
    parser.add_argument("--picture", help="write ranks and step times to this .svg or .png")
    parser.add_argument("--json", action="store_true", help="print JSON, with every rank's place")
    parser.add_argument("--scaling", action="store_true", help="compare table strategies on 8 to 4,096 ranks")
    known, overrides = parser.parse_known_args(arguments)
    return _plan(known, overrides)


def _plan(known, overrides: Sequence[str]) -> int:  # type: ignore[no-untyped-def]
    from gem_comm.api import read_topology
    from rich.console import Console

    from gem_pipelines.planner.estimate import Assumptions
    from gem_pipelines.planner.picture import draw_plan
    from gem_pipelines.planner.search import make_plan, parse_mesh
    from gem_pipelines.planner.text import plan_json, print_plan
    from gem_pipelines.planner.workloads import WORKLOADS

    if known.sync_every < 1:
        raise ConfigError(f"--sync-every is {known.sync_every}, expected at least 1")
    topology = read_topology(known.topology)
    if known.recipe not in (*RECIPES, *WORKLOADS):
        raise ConfigError(f"unknown recipe {known.recipe!r}; {did_you_mean(known.recipe, (*RECIPES, *WORKLOADS))}")
    if not known.scaling and known.world is None:
        raise ConfigError("--world is missing: how many ranks? e.g. --world 8")
    if not known.scaling and known.world < 1:
        raise ConfigError(f"--world is {known.world}, expected a number of ranks of at least 1")
    workload, table_sync = _workload(known.recipe, overrides, 1 if known.scaling else known.world)
    if min(known.host_ms) < 0:
        raise ConfigError(f"--host-ms is {known.host_ms}, expected three times of at least 0")
    host = dict(zip(("host_s", "collective_host_s", "unit_host_s"), (ms / 1e3 for ms in known.host_ms), strict=True))
    assumptions = Assumptions(table_sync=known.table_sync or table_sync, sync_every=known.sync_every, **host)
    if assumptions.table_sync == "gradients" and known.sync_every > 1:
        raise ConfigError(f"--sync-every is {known.sync_every}: gradients are exchanged at every step; use average")
    if known.scaling:
        return _scaling(known, workload, topology, assumptions)
    mesh = None if known.mesh is None else parse_mesh(known.mesh)
    if mesh is not None:
        mesh.check_world(known.world)
    plan = make_plan(workload, topology, known.world, assumptions=assumptions, mesh=mesh)
    if known.json:
        print(json.dumps(plan_json(plan), indent=1))
    else:
        console = Console()
        print_plan(plan, console)
    if known.picture:
        written = draw_plan(plan, Path(known.picture))
        if not known.json:
            print(f"picture: {written}")
    return 0


def _scaling(known, workload, topology, assumptions) -> int:  # type: ignore[no-untyped-def]
    from rich.console import Console

    from gem_pipelines.planner.scaling import scale
    from gem_pipelines.planner.text import NOTE, estimate_json, scaling_table, scaling_text

    points = scale(workload, topology, assumptions=assumptions)
    if known.json:
        found = [
            {"strategy": p.strategy, "world_size": p.world_size, "samples_per_s_per_rank": p.rate}
            | estimate_json(p.best)
            for p in points
        ]
        print(json.dumps(found, indent=1))
        return 0
    console = Console()
    console.print(scaling_table(points))
    console.print(scaling_text(points), highlight=False)
    console.print(NOTE.partition(". ")[0] + ".", highlight=False)
    return 0


def _workload(name: str, overrides: Sequence[str], world_size: int):  # type: ignore[no-untyped-def]
    """(workload, how its copies of tables are kept equal)."""
    from gem_pipelines.planner.workloads import WORKLOADS, find_workload

    if name in WORKLOADS:
        if overrides:
            raise ConfigError(f"{overrides[0]}: workload {name!r} has no configuration to override")
        return find_workload(name), "average"
    import torch

    from gem_pipelines.config_overrides import apply_overrides
    from gem_pipelines.data_source import data_directory
    from gem_pipelines.planner.recipe import recipe_workload
    from gem_pipelines.recipes import find_recipe
    from gem_pipelines.runtime import Runtime

    config = apply_overrides(find_recipe(name), overrides, own_flags=("--topology", "--recipe", "--world", "--mesh"))
    alone = Runtime(rank=0, world_size=1, device=torch.device("cpu"))
    data = data_directory(config.data, runtime=alone, say=print)
    return recipe_workload(config, data, world_size=world_size), config.parallel.table_sync
