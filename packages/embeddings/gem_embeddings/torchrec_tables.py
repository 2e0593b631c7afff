"""Tables through TorchRec: sharded by DistributedModelParallel, updated by FBGEMM inside backward.

Pooled tables live in one EmbeddingBagCollection, weighted ones in one of their own, the others in one
EmbeddingCollection per embedding dim (a collection wants a single dim). Placement is explicit: table-wise tables go
largest first to the least loaded rank, row-wise ones are cut evenly; so it needs no performance model, no collective,
and is the same on every run. TorchRec's planner decides where it is asked to (planned.py).

What TorchRec does not do, and this file does:
- zero rows: a sharded collection cannot reshape a batch of zero rows, so it gets one row without ids, cut off after;
- unequal rows per rank: row-wise pooling reduces equal blocks, so all ranks are filled up with rows without ids to the
  largest (one small all-reduce, only if a pooled table is row-wise);
- means: TorchRec divides by length + 1e-6 when a pooled table is row-wise, an error of 1e-6 in every gradient (of the
  sum-pooled tables beside it too); so all bags are summed there and divided by their length here;
- key order: a sharded module learns the order of the features at its first batch, so every batch is brought into one;
- state: whole tables under their plain names, instead of shards under names that contain the sharding.

Column-wise sharding is not offered: each slice would keep its own momentum, which is another optimizer than row-wise
AdaGrad on the whole row. Cost of a `table_state`: one all-reduce of each whole table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.ahead import Started, on_stream
from gem_embeddings.averaged import AveragedCopies, scaled_optimizer
from gem_embeddings.copies import Copies, SingleCopy, SummedCopies
from gem_embeddings.initial import initial_rows
from gem_embeddings.interface import PlannerInputs, Policy, Prepared, Replicas, RowWiseAdagrad, TableSpec
from gem_embeddings.local_tables import LocalTable, find_local_tables
from gem_embeddings.planned import plan_tables
from gem_embeddings.policies import IdPolicies
from gem_embeddings.sharing import SharedFeatures
from gem_embeddings.sliced import SlicedAverages, SlicedSums
from gem_embeddings.validation import check_cache, check_learning_rate, check_row_wise, check_state, own_prepared


class TorchRecTables(nn.Module):
    """See `gem_embeddings.interface.Tables`. Its parameters must not go into a dense optimizer."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        optimizer: RowWiseAdagrad,
        seed: int,
        process_group: Any = None,
        device: Any = "cpu",
        sharding: Mapping[str, str],
        replicas: Replicas | None = None,
        policies: Mapping[str, Policy] | None = None,
        planner: PlannerInputs | None = None,
        cache_share: float | None = None,
    ) -> None:
        super().__init__()
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                'impl="torchrec" needs an initialised process group, also for one process: call '
                'torch.distributed.init_process_group("gloo") first, or use impl="reference"'
            )
        self._sharing = SharedFeatures(specs)
        self.specs = specs = self._sharing.specs
        self.group = process_group if process_group is not None else dist.group.WORLD
        size = dist.get_world_size(self.group)
        check_row_wise(specs, sharding, size)
        self.device = torch.device(device)
        check_cache(cache_share, self.device.type, replicas)
        collections = _Collections(specs)
        self._places = _decide(collections, specs, sharding, planner, size, self.device)
        self._equal_rows = size > 1 and any(
            spec.pooling != "none" and self._places[spec.name] is None for spec in specs
        )
        self._policies = IdPolicies(specs, self._sharing.policies(policies))
        fused_adagrad = replicas is None or replicas.sync == "average"
        fused = scaled_optimizer(optimizer, replicas) if fused_adagrad else None
        self._model = _distribute(
            collections, specs, fused, self.group, self.device, rank_of=self._places, cache_share=cache_share
        )
        by_name = {spec.name: spec for spec in specs}
        local = find_local_tables(self._model)
        for table in local:
            stop = table.start + table.weight.shape[0]
            table.weight.copy_(initial_rows(by_name[table.name], seed=seed, start=table.start, stop=stop))
        self._copies = _make_copies(local, optimizer, replicas)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def prepare(self, ids: KeyedJaggedTensor) -> Started:
        """Check ids, apply policies, start their exchange; see the interface."""
        if self._stream is not None and ids.values().device.type == "cuda":
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with on_stream(self._stream):
            if self._stream is not None:
                ids = ids.to(self.device, non_blocking=True)
            ids, kept = self._policies.apply(self._sharing.spread(ids))
            wanted = max(ids.stride(), 1)
            if self._equal_rows:
                most = torch.tensor([wanted], device=self.device)
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
                wanted = int(most)
            collections = self._model.module
            started = Started(ids, kept, ids.stride(), self._stream, collections.sharded())
            started.send(collections.parts(_with_rows(ids, wanted)))
        return started

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Feature -> (N, dim) or (B, dim); see the interface."""
        return self.look_up(self.prepare(ids))

    def look_up(self, prepared: Prepared) -> dict[str, Tensor]:
        """What `forward` gives for the ids that were prepared."""
        started = own_prepared(prepared, Started)
        rows, kept = started.rows, started.kept
        self._copies.start_lookup()
        started.wait()
        self._copies.before_lookup()
        found = started.look_up()
        bags, sequences = found[: len(self._model.module.bags)], found[len(self._model.module.bags) :]
        ids = started.ids
        out: dict[str, Tensor] = {}
        for collection in bags:
            out.update({feature: vectors[:rows] for feature, vectors in collection.to_dict().items()})
        for collection in sequences:
            out.update({feature: jagged.values() for feature, jagged in collection.items()})
        training = torch.is_grad_enabled()
        self._copies.after_lookup(training=training)
        if training:
            out = self._copies.guard(out)
        for spec in self.specs:
            if spec.pooling == "mean":
                out.update({feature: _divide_by_length(out[feature], ids, feature) for feature in spec.features})
        return self._policies.fill_in(out, kept)

    def table_state(self) -> dict[str, dict[str, Tensor]]:
        """Table name -> {"weight", "momentum"}, whole, on CPU, on every rank. A collective: all ranks must call it."""
        weights: dict[str, list[tuple[Tensor, int]]] = {}
        moments: dict[str, list[tuple[Tensor, int]]] = {}
        for table, (weight, momentum) in zip(self._copies.tables, self._copies.state(), strict=True):
            weights.setdefault(table.name, []).append((weight, table.start))
            moments.setdefault(table.name, []).append((momentum, table.start))
        return {
            spec.name: {
                "weight": self._gather((spec.rows, spec.dim), weights.get(spec.name, ())),
                "momentum": self._gather((spec.rows,), moments.get(spec.name, ())),
            }
            for spec in self.specs
        }

    def load_table_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Inverse of `table_state`; ValueError and no change if anything does not fit. Each rank takes its shards."""
        check_state(self.specs, state)
        parts = []
        for table in self._copies.tables:
            rows = slice(table.start, table.start + table.weight.shape[0])
            parts.append((state[table.name]["weight"][rows], state[table.name]["momentum"][rows]))
        self._copies.load(parts)

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of every table from the next forward on."""
        check_learning_rate(lr)
        self._copies.set_learning_rate(lr)

    def placement(self) -> dict[str, str]:
        """Table name -> "whole on rank r" or "rows over n ranks", of one copy."""
        size = dist.get_world_size(self.group)
        return {
            name: f"rows over {size} ranks" if rank is None else f"whole on rank {rank}"
            for name, rank in self._places.items()
        }

    def copied_parts(self) -> dict[str, Tensor]:
        """ "<table>.weight" and "<table>.momentum" of what this rank holds in copy; see the interface."""
        found = {}
        for table, parts in zip(self._copies.tables, self._copies.copied(), strict=False):
            for name, part in zip(("weight", "momentum"), parts, strict=True):
                found[f"{table.name}@{table.start}.{name}"] = part
        return found

    def policy_counts(self) -> dict[str, dict[str, int]]:
        """Feature -> {"ids", "outside"} where the policy is not "error"; this rank's batches."""
        return self._policies.counts()

    def _gather(self, shape: tuple[int, ...], parts: Sequence[tuple[Tensor, int]]) -> Tensor:
        whole = torch.zeros(shape, device=self.device)
        for part, start in parts:
            whole[start : start + part.shape[0]] = part
        if dist.get_world_size(self.group) > 1:
            # Every element is zero bits on all ranks but its owner's: an integer sum keeps each float bit for bit.
            dist.all_reduce(whole.view(torch.int32), group=self.group)
        return whole.cpu()


class _Collections(nn.Module):
    """The TorchRec modules; DistributedModelParallel puts sharded ones in their places."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
        from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

        super().__init__()
        meta = torch.device("meta")
        pooled = [spec for spec in specs if spec.pooling != "none"]
        self.bags = nn.ModuleDict()
        self.bag_features: dict[str, list[str]] = {}
        for kind in ("plain", "weighted"):
            own = [spec for spec in pooled if spec.weighted == (kind == "weighted")]
            if not own:
                continue
            configs = [EmbeddingBagConfig(pooling=PoolingType.SUM, **_table_arguments(spec)) for spec in own]
            self.bags[kind] = EmbeddingBagCollection(tables=configs, device=meta, is_weighted=kind == "weighted")
            self.bag_features[kind] = [feature for spec in own for feature in spec.features]
        self.sequences = nn.ModuleDict()
        self.sequence_features: dict[str, list[str]] = {}
        for dim in sorted({spec.dim for spec in specs if spec.pooling == "none"}):
            own = [spec for spec in specs if spec.pooling == "none" and spec.dim == dim]
            configs = [EmbeddingConfig(**_table_arguments(spec)) for spec in own]
            self.sequences[f"dim{dim}"] = EmbeddingCollection(tables=configs, device=meta)
            self.sequence_features[f"dim{dim}"] = [feature for spec in own for feature in spec.features]

    def sharded(self) -> list[nn.Module]:
        """The modules, bags first."""
        return [*self.bags.values(), *self.sequences.values()]

    def parts(self, ids: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        """What each of `sharded()` looks up."""
        bags = [_select(ids, self.bag_features[kind], weighted=kind == "weighted") for kind in self.bags]
        return [*bags, *(_select(ids, self.sequence_features[name]) for name in self.sequences)]


def _table_arguments(spec: TableSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "num_embeddings": spec.rows,
        "embedding_dim": spec.dim,
        "feature_names": list(spec.features),
    }


def _decide(
    collections: _Collections,
    specs: Sequence[TableSpec],
    sharding: Mapping[str, str],
    planner: PlannerInputs | None,
    ranks: int,
    device: torch.device,
) -> dict[str, int | None]:
    """Table name -> the rank that holds it whole; None: its rows are cut over all ranks."""
    if planner is None:
        whole = place_tables([spec for spec in specs if sharding.get(spec.name) != "row_wise"], ranks)
        return {spec.name: whole.get(spec.name) for spec in specs}
    planned = plan_tables(collections, specs, inputs=planner, ranks=ranks, device=device.type, given=sharding)
    return {spec.name: planned[spec.name][1] for spec in specs}


def _make_copies(tables: Sequence[LocalTable], optimizer: RowWiseAdagrad, replicas: Replicas | None) -> Copies:
    if replicas is None:
        return SingleCopy(tables, optimizer)
    if replicas.fully_sharded:
        return (SlicedSums if replicas.sync == "gradients" else SlicedAverages)(tables, optimizer, replicas)
    return (SummedCopies if replicas.sync == "gradients" else AveragedCopies)(tables, optimizer, replicas)


def _distribute(
    collections: _Collections,
    specs: Sequence[TableSpec],
    optimizer: RowWiseAdagrad | None,
    group: Any,
    device: torch.device,
    *,
    rank_of: Mapping[str, int | None],
    cache_share: float | None,
) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.comm import get_local_size
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan

    size = dist.get_world_size(group)
    # Without an optimizer of its own FBGEMM only subtracts the summed gradient; see copies.py.
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
    bag_sharder = EmbeddingBagCollectionSharder(fused_params=dict(fused))
    sequence_sharder = EmbeddingCollectionSharder(fused_params=dict(fused))

    def plan_for(module: nn.Module, sharder: Any, tables: Sequence[TableSpec]) -> Any:
        how = {
            spec.name: table_wise(rank=rank_of[spec.name], compute_kernel=kernel)
            if rank_of[spec.name] is not None
            else row_wise(compute_kernel=kernel)
            for spec in tables
        }
        found = construct_module_sharding_plan(
            module,
            how,
            sharder=sharder,
            local_size=get_local_size(size) if device.type == "cuda" else size,
            world_size=size,
            device_type=device.type,
        )
        if size < dist.get_world_size():
            _name_global_ranks(found, group)
        return found

    plan = {}
    for kind, module in collections.bags.items():
        own = [spec for spec in specs if spec.pooling != "none" and spec.weighted == (kind == "weighted")]
        plan[f"bags.{kind}"] = plan_for(module, bag_sharder, own)
    for name, module in collections.sequences.items():
        own = [spec for spec in specs if spec.pooling == "none" and f"dim{spec.dim}" == name]
        plan[f"sequences.{name}"] = plan_for(module, sequence_sharder, own)
    return DistributedModelParallel(
        collections,
        env=_environment(group),
        device=device,
        plan=ShardingPlan(plan),
        sharders=[bag_sharder, sequence_sharder],
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


def _name_global_ranks(plan: Any, group: Any) -> None:
    """Sharded tensors name the owner of a shard by its rank in the world, and the owner's device by its number on the
    owner's host; TorchRec's plan names both as if the group were the world.
    """
    from torchrec.distributed.comm import get_local_size

    per_host = get_local_size(dist.get_world_size())
    for sharding in plan.values():
        for shard in sharding.sharding_spec.shards:
            owner = dist.get_global_rank(group, shard.placement.rank())
            device = shard.placement.device()
            named = f"cuda:{owner % per_host}" if device.type == "cuda" else str(device)
            shard.placement = torch.distributed._remote_device(f"rank:{owner}/{named}")


def place_tables(specs: Sequence[TableSpec], ranks: int) -> dict[str, int]:
    """Table name -> rank: largest first, each to the rank with the fewest bytes so far (lowest rank on a tie).

    Example: tables of 9, 5, 4 and 1 rows of equal dim on two ranks go to ranks 0, 1, 1 and 0: loads 10 and 9.
    """
    loads = [0] * ranks
    placed = {}
    for spec in sorted(specs, key=lambda spec: (-spec.rows * spec.dim, spec.name)):
        rank = loads.index(min(loads))
        placed[spec.name] = rank
        loads[rank] += spec.rows * spec.dim
    return placed


def _select(ids: KeyedJaggedTensor, features: Sequence[str], *, weighted: bool = False) -> KeyedJaggedTensor:
    keys = ids.keys()
    chosen = ids.permute([keys.index(feature) for feature in features])
    if chosen.weights_or_none() is None or weighted:
        return chosen
    return KeyedJaggedTensor(keys=chosen.keys(), values=chosen.values(), lengths=chosen.lengths())


def _divide_by_length(vectors_BD: Tensor, ids: KeyedJaggedTensor, feature: str) -> Tensor:
    if ids.stride() == 0:
        return vectors_BD
    lengths_B = ids.lengths().view(-1, ids.stride())[ids.keys().index(feature)]
    return vectors_BD / lengths_B.clamp(min=1).to(vectors_BD.dtype)[:, None]


def _with_rows(ids: KeyedJaggedTensor, rows: int) -> KeyedJaggedTensor:
    """The same batch with rows without ids appended until it has `rows` rows."""
    missing = rows - ids.stride()
    if missing == 0:
        return ids
    keys = ids.keys()
    lengths_FB = ids.lengths().view(len(keys), -1) if ids.stride() else ids.lengths().new_zeros(len(keys), 0)
    lengths_FB = torch.nn.functional.pad(lengths_FB, (0, missing))
    return KeyedJaggedTensor(
        keys=keys, values=ids.values(), lengths=lengths_FB.flatten(), weights=ids.weights_or_none()
    )
