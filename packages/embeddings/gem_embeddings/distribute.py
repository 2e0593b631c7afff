"""TorchRec's sharded modules for given layouts: plan, sharders, and TorchRec's view of a process group."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gem_embeddings.interface import RowWiseAdagrad, TableSpec
from gem_embeddings.layout import Layout

TORCHREC_KIND = {"grid": "grid_shard"}


def distribute(
    collections: Any,
    specs: Sequence[TableSpec],
    optimizer: RowWiseAdagrad | None,
    group: Any,
    device: torch.device,
    *,
    layouts: Mapping[str, Layout],
    cache_share: float | None,
) -> Any:
    """DistributedModelParallel over `group`; optimizer None: FBGEMM only subtracts the summed gradient (copies.py)."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

    fused: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
    if optimizer is not None:
        fused = {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": optimizer.lr,
            "eps": optimizer.eps,
        }
    kernel = "fused"
    if cache_share is not None:
        kernel, fused["cache_load_factor"] = "fused_uvm_caching", cache_share

    def plan_for(own: Sequence[TableSpec]) -> Any:
        found = EmbeddingModuleShardingPlan()
        for spec in own:
            found[spec.name] = _parameter_sharding(layouts[spec.name], kernel, group, device)
        return found

    _be_quiet()
    plan = {}
    for kind in collections.bags:
        own = [spec for spec in specs if spec.pooling != "none" and spec.weighted == (kind == "weighted")]
        plan[f"bags.{kind}"] = plan_for(own)
    for name in collections.sequences:
        own = [spec for spec in specs if spec.pooling == "none" and f"dim{spec.dim}" == name]
        plan[f"sequences.{name}"] = plan_for(own)
    return DistributedModelParallel(
        collections,
        env=_environment(group),
        device=device,
        plan=ShardingPlan(plan),
        sharders=[
            EmbeddingBagCollectionSharder(fused_params=dict(fused)),
            EmbeddingCollectionSharder(fused_params=dict(fused)),
        ],
    )


def _be_quiet() -> None:
    """TorchRec warns of every process group it makes and of what it infers from torchrun's environment."""
    for name in ("comm", "utils"):
        logging.getLogger(f"torchrec.distributed.{name}").setLevel(logging.ERROR)


def ranks_of_a_host(group: Any) -> int:
    """How many ranks TorchRec takes for a host; 0 where `group` is a part of the job, whose hosts it does not know."""
    from torchrec.distributed.comm import get_topology_group_world_size

    _be_quiet()
    world = dist.get_world_size()
    return get_topology_group_world_size(world) if dist.get_world_size(group) == world else 0


def limit_host_groups(device: torch.device, timeout: timedelta) -> None:
    """Let collectives within a host and between hosts take `timeout`. TorchRec makes these two groups itself, once a
    process, takes no limit for them, and torch does not hand on that of the default group: they would have 30 minutes
    over gloo, 10 over NCCL.
    """
    from torchrec.distributed.comm import intra_and_cross_node_pg

    for group in intra_and_cross_node_pg(device):  # those that the tables got: it makes them only once
        group.set_timeout(timeout)


def _parameter_sharding(layout: Layout, kernel: str, group: Any, device: torch.device) -> Any:
    """TorchRec's description. Sharded tensors name the owner of a shard by its rank in the world, and the owner's
    device by its number on the owner's host; TorchRec's plan names both as if the group were the world.
    """
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
    from torchrec.distributed.comm import get_local_size
    from torchrec.distributed.types import ParameterSharding

    size = dist.get_world_size(group)
    if layout.kind == "data_parallel":
        return ParameterSharding(
            sharding_spec=None, sharding_type="data_parallel", compute_kernel="dense", ranks=list(range(size))
        )
    per_host = get_local_size(dist.get_world_size()) if device.type == "cuda" else 1

    def place_of(rank: int) -> str:
        owner = dist.get_global_rank(group, rank)
        return f"rank:{owner}/cuda:{owner % per_host}" if device.type == "cuda" else f"rank:{owner}/{device.type}"

    return ParameterSharding(
        sharding_spec=EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[shard.first_row, shard.first_column],
                    shard_sizes=[shard.rows, shard.columns],
                    placement=place_of(shard.rank),
                )
                for shard in layout.shards
            ]
        ),
        sharding_type=TORCHREC_KIND.get(layout.kind, layout.kind),
        compute_kernel=kernel,
        ranks=[shard.rank for shard in layout.shards],
    )


def _environment(group: Any) -> Any:
    """TorchRec's view of `group`. Its own constructor makes a mesh of ranks 0 to N - 1, which is wrong for a part of
    the world and needed for none of what is used here.
    """
    from torchrec.distributed.types import ShardingEnv

    if dist.get_world_size(group) == dist.get_world_size():
        return ShardingEnv.from_process_group(group)
    env = ShardingEnv.from_local(dist.get_world_size(group), dist.get_rank(group))
    env.process_group = group
    return env


def modules_of(sharded: nn.Module) -> list[nn.Module]:
    """All inside a sharded collection's lookups, which it keeps in a plain list, so that parameters count once."""
    return [inner for lookup in getattr(sharded, "_lookups", ()) for inner in lookup.modules()]
