"""Parallel sections and expert parallelism without processes: ranks are threads, the oracle is the plain module."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gem_comm.reference import run_ranks, thread_groups
from gem_embeddings.api import SHARDINGS
from gem_embeddings.testing import SPECS, shardable
from gem_pipelines import parallel_mesh
from gem_pipelines.config import ParallelConfig, RunConfig, TablesConfig
from gem_pipelines.errors import ConfigError
from gem_pipelines.model.config import InteractionConfig
from gem_pipelines.model.dhen import Dhen
from gem_pipelines.model.gem import GemModel
from gem_pipelines.model.plan import plan_model
from gem_pipelines.model.testing import KINDS, make_config, make_inputs, make_schema
from gem_pipelines.model.wukong import WukongExperts
from gem_pipelines.parallel_experts import ExpertGroup, ExpertParts, ExpertSum, place_experts
from gem_pipelines.parallel_mesh import mesh_spec
from gem_pipelines.parallelize import _place_tables, _table_group
from gem_pipelines.recipes import find_recipe
from gem_pipelines.runtime import Runtime
from torch import nn
from torch.distributed import distributed_c10d
from torchrec.distributed import comm as torchrec_comm

TOKENS, DIM = 7, 6


def test_what_is_left_of_the_world_is_copies_of_the_model_and_parts_of_the_tables():
    spec = mesh_spec(ParallelConfig(expert=2, shard=2), 8)
    assert (spec.expert, spec.shard, spec.replicate) == (2, 2, 2)
    assert (spec.table_shard, spec.table_replica) == (8, 1)
    spec = mesh_spec(ParallelConfig(table_replica=4, fully_sharded=True), 8)
    assert (spec.replicate, spec.table_shard, spec.table_replica, spec.fully_sharded) == (8, 2, 4, True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ParallelConfig(shard=3), r"shard 3 x replicate 2 = 6, table_shard 8 x table_replica 1 = 8; both .* 8"),
        (ParallelConfig(table_shard=2, table_replica=2), r"table_shard 2 x table_replica 2 = 4; both"),
        (ParallelConfig(expert=16), r"expert 16 x shard 1 x replicate 1 = 16"),
    ],
)
def test_a_mesh_that_does_not_fit_prints_both_products(config, words):
    with pytest.raises(ConfigError, match=words):
        mesh_spec(config, 8)


def test_the_tables_group_waits_as_long_as_the_job_says(runtime, monkeypatch):
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda **given: made.append(given))
    _table_group(dataclasses.replace(runtime, world_size=2, device=torch.device("cuda")))
    assert made == [{"timeout": timedelta(seconds=60), "group_desc": "tables"}]  # what the fixture starts with


@pytest.mark.parametrize("kind", SHARDINGS)
def test_every_group_made_for_the_tables_waits_as_long_as_the_job_says(runtime, monkeypatch, kind):
    """Those too that TorchRec makes for tables that lie on a host, and keeps for the process."""
    made, make = [], distributed_c10d._new_process_group_helper

    def noted(*given: Any, **named: Any) -> Any:
        group, store = make(*given, **named)
        made.append(group)
        return group, store

    for name in ("_INTRA_PG", "_CROSS_PG"):  # of jobs before in this process
        monkeypatch.setattr(torchrec_comm, name, None)
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", noted)
    config = TablesConfig(sharding=tuple(f"{table}={kind}" for table in shardable(kind)))
    given = {"parallel": ParallelConfig(), "meshes": None, "seed": 0, "runtime": runtime, "rows_per_rank": 8}
    _place_tables(SPECS, config, {}, **given)
    assert len(made) == (2 if kind in ("table_row_wise", "grid") else 0)  # within the host, and between hosts
    limits = [group._get_backend(torch.device("cpu")).options._timeout for group in made]
    assert limits == [timedelta(seconds=60)] * len(made)


def test_averages_and_checkpoints_must_meet():
    every = ParallelConfig(table_replica=2, table_sync="average", table_sync_every=4)
    debug = find_recipe("debug")
    with pytest.raises(ConfigError, match=r"checkpoint_every 10 .* multiple of table_sync_every"):
        dataclasses.replace(debug, parallel=every)
    fitting = dataclasses.replace(debug.train, checkpoint_every=8)
    assert isinstance(dataclasses.replace(debug, parallel=every, train=fitting), RunConfig)
    with pytest.raises(ConfigError, match="accumulate 1"):
        dataclasses.replace(debug, parallel=every, train=fitting, data=dataclasses.replace(debug.data, accumulate=2))
    with pytest.raises(ConfigError, match="exchanged at every step"):
        ParallelConfig(table_sync_every=2)


def interaction(kind: str) -> nn.Module:
    torch.manual_seed(0)
    own = InteractionConfig(
        kind=kind,
        members=("fm", "linear", "dcn", "attention"),
        experts=4,
        fm_tokens=4,
        linear_tokens=4,
        rank=3,
        hidden=(5,),
        dcn_rank=2,
    )
    made = {"dhen": Dhen, "experts": WukongExperts}[kind](TOKENS, make_config(interaction=own, dim=DIM))
    return made.double()


@pytest.mark.parametrize("rows", [(3, 2), (0, 4), (1, 0, 2, 5)])
@pytest.mark.parametrize("kind", ["dhen", "experts"])
def test_experts_over_ranks_are_the_plain_module(kind, rows):
    """Outputs, gradients of the inputs, and gradients of each expert (divided by the ranks) with uneven rows."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(count, TOKENS, DIM, generator=generator, dtype=torch.float64) for count in rows]
    weights = [torch.randn(count, 8, DIM, generator=generator, dtype=torch.float64) for count in rows]
    plain = interaction(kind)
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = plain(torch.cat(leaves))
    (expected * torch.cat(weights)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    ranks = thread_groups([tuple(range(len(rows)))], axis="expert")

    def one(rank: int) -> dict[str, Any]:
        module, group = modules[rank], ExpertGroup(ranks[rank])
        group.rows = rows
        if kind == "dhen":
            module.members = ExpertSum(module.members, group, "here")
        else:
            module.experts = ExpertParts(module.experts, group, "here")
        x = inputs[rank].clone().requires_grad_()
        y = module(x)
        (y * weights[rank]).sum().backward()
        return {"y": y.detach(), "x": x.grad, "own": {n: p.grad for n, p in module.named_parameters()}}

    modules = [interaction(kind) for _ in rows]  # one after the other: they draw from one generator
    found = run_ranks(len(rows), one)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([each["y"] for each in found]), expected.detach(), **close)
    for each, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(each["x"], leaf.grad, **close)
    seen = set()
    for each in found:
        experts = {n: g for n, g in each["own"].items() if n.startswith(("members.", "experts."))}
        for name, grad in experts.items():
            torch.testing.assert_close(grad * len(rows), gradients[name], **close)
        assert not seen & experts.keys()
        seen |= experts.keys()
    assert seen == {name for name in gradients if name.startswith(("members.", "experts."))}


def build(kind: str) -> GemModel:
    config = KINDS[kind]
    return GemModel(plan_model(make_schema(), config), config)


def test_layers_without_experts_and_numbers_that_do_not_divide_are_refused():
    pair = thread_groups([(0, 1)], axis="expert")
    with pytest.raises(ConfigError, match=r"layers\.0\.interaction is a Wukong, which has no experts"):
        place_experts(build("hstu"), ExpertGroup(pair[0]))
    with pytest.raises(ConfigError, match=r"does not divide the 5 experts of layers\.0\.interaction \(fm, linear"):
        place_experts(build("interformer"), ExpertGroup(pair[0]))


def test_owners_are_named_by_canonical_prefix():
    pair = thread_groups([(0, 1)], axis="expert")
    model = build("kunlun")
    names = {name for name, _ in model.named_parameters()}
    owners = place_experts(model, ExpertGroup(pair[1]))
    assert owners == {f"layers.{i}.interaction.experts.{e}.": e for i in range(2) for e in range(2)}
    kept = {name for name, _ in model.named_parameters()}
    assert names - kept == {name for name in names if ".experts.0." in name and "interaction" in name}


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("clicks", "views"), [([0, 0], [0, 0]), ([3, 1], [0, 0])])
def test_every_parameter_has_a_gradient_on_every_batch(kind, clicks, views):
    """Rows without events too: FSDP2 reduces what has a gradient, so ranks must agree on what that is."""
    config = KINDS[kind]
    torch.manual_seed(0)
    model = GemModel(plan_model(make_schema(), config), config).double()
    model(make_inputs(clicks, views)).sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


def test_groups_of_a_part_of_the_ranks_have_the_runs_time_limit(monkeypatch):
    """Axes over all ranks use the default group, which has it already."""
    given = {}
    monkeypatch.setattr(parallel_mesh, "build_meshes", lambda placed, **options: given.update(options))
    limit = timedelta(seconds=7)
    runtime = Runtime(rank=0, world_size=4, device=torch.device("cpu"), timeout=limit)
    parallel_mesh.make_meshes(ParallelConfig(shard=2, table_replica=2), runtime)
    axes = ("expert", "shard", "replicate", "shard_expert", "table_shard", "table_replica")
    assert given["timeouts"] == dict.fromkeys(axes, limit)
    parallel_mesh.make_meshes(ParallelConfig(shard=4), runtime)
    assert "shard" not in given["timeouts"]
