"""Tables through TorchRec: sharded by DistributedModelParallel, updated by FBGEMM inside backward.

Pooled tables live in one EmbeddingBagCollection, weighted ones in one of their own, the others in one
EmbeddingCollection per embedding dim (a collection wants a single dim). Placement is explicit (layout.py); TorchRec's
planner decides where it is asked to (planned.py).

What TorchRec does not do, and this file does:
- zero rows: a sharded collection cannot reshape a batch of zero rows, so it gets one row without ids, cut off after;
- unequal rows per rank: pooling of tables cut by rows reduces equal blocks, so all ranks are filled up with rows
  without ids to the largest (one small all-reduce, only if a pooled table is cut by rows);
- means: TorchRec divides by length + 1e-6 when a pooled table is cut by rows, an error of 1e-6 in every gradient (of
  the sum-pooled tables beside it too); so all bags are summed there and divided by their length here;
- key order: a sharded module learns the order of the features at its first batch, so every batch is brought into one;
- state: whole tables under their plain names, instead of shards under names that contain the sharding.

Cost of a `table_state`: one all-reduce of each whole table, one table after another in the device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.ahead import Started, on_stream
from gem_embeddings.averaged import AveragedCopies, scaled_optimizer
from gem_embeddings.copies import Copies, SingleCopy, SummedCopies
from gem_embeddings.dense_tables import DenseTables
from gem_embeddings.distribute import distribute, limit_host_groups, ranks_of_a_host
from gem_embeddings.initial import initial_rows, initial_values
from gem_embeddings.interface import ManagedIds, PlannerInputs, Policy, Prepared, Replicas, RowWiseAdagrad, TableSpec
from gem_embeddings.layout import CUT_BY_ROWS, ON_A_HOST, WHOLE_JOB, check_sharding, parse_sharding, place
from gem_embeddings.local_tables import LocalTable, find_local_tables
from gem_embeddings.managed import ManagedTables, check_id_state
from gem_embeddings.planned import plan_tables
from gem_embeddings.policies import IdPolicies
from gem_embeddings.sharing import SharedFeatures
from gem_embeddings.sliced import SlicedAverages, SlicedSums
from gem_embeddings.validation import (
    check_cache,
    check_learning_rate,
    check_state,
    own_prepared,
    state_shapes,
)


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
        managed: Mapping[str, ManagedIds] | None = None,
        timeout: timedelta | None = None,
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
        kinds = {parse_sharding(text)[0] for text in sharding.values()}
        host = ranks_of_a_host(self.group) if kinds & set(WHOLE_JOB) else size
        check_sharding(specs, sharding, ranks=size, host=host)
        self.device = torch.device(device)
        check_cache(cache_share, self.device.type, replicas)
        collections = _Collections(specs)
        if planner is None:
            self._layouts = place(specs, sharding, ranks=size, host=host)
        else:
            self._layouts = plan_tables(
                collections, specs, inputs=planner, ranks=size, host=host, device=self.device.type, given=sharding
            )
        self._parts = {name: layout.parts for name, layout in self._layouts.items()}
        self._equal_rows = size > 1 and any(
            spec.pooling != "none" and self._layouts[spec.name].kind in CUT_BY_ROWS for spec in specs
        )
        self._policies = IdPolicies(specs, self._sharing.policies(policies))
        fused_adagrad = replicas is None or replicas.sync == "average"
        fused = scaled_optimizer(optimizer, replicas) if fused_adagrad else None
        self._model = distribute(
            collections, specs, fused, self.group, self.device, layouts=self._layouts, cache_share=cache_share
        )
        if timeout is not None and any(layout.kind in ON_A_HOST for layout in self._layouts.values()):
            limit_host_groups(self.device, timeout)
        by_name = {spec.name: spec for spec in specs}
        local = find_local_tables(self._model)
        for table in local:
            rows, columns = table.block
            start = initial_rows(by_name[table.name], seed=seed, start=rows.start, stop=rows.stop)
            table.weight.copy_(start[:, columns])
        self._dense = DenseTables(self._model, optimizer)
        for whole in self._dense.tables:
            whole.weight.copy_(initial_rows(by_name[whole.name], seed=seed, start=0, stop=whole.weight.shape[0]))
        self._copies = _make_copies(local, optimizer, replicas)
        self._seed, self._managed = seed, None
        if managed:
            exchange = None if replicas is None else replicas.exchange
            self._managed = ManagedTables(specs, managed, group=self.group, exchange=exchange, device=self.device)
        # Of high priority: the host waits for its small kernels, which would queue up behind those of the dense part.
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None

    def prepare(self, ids: KeyedJaggedTensor) -> Started:
        """Check ids, apply policies, start their exchange; see the interface."""
        return self._prepare(ids, count=True)

    def _prepare(self, ids: KeyedJaggedTensor, *, count: bool) -> Started:
        self._settle()
        given = ids
        if self._stream is not None and ids.values().device.type == "cuda":
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with on_stream(self._stream):
            if self._stream is not None:
                ids = ids.to(self.device, non_blocking=True)
            ids, mapped = self._sharing.spread(ids), None
            if self._managed is not None:
                mapped = self._managed.apply(ids)
                ids = mapped.ids
            ids, kept = self._policies.apply(ids, count=count)
            wanted = max(ids.stride(), 1)
            if self._equal_rows:
                most = torch.tensor([wanted], device=self.device)
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
                wanted = int(most)
            collections = self._model.module
            started = Started(ids, kept, ids.stride(), self._stream, collections.sharded())
            started.given, started.mapped = given, mapped
            started.send(collections.parts(_with_rows(ids, wanted)))
        return started

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Feature -> (N, dim) or (B, dim); see the interface."""
        return self.look_up(self.prepare(ids))

    def look_up(self, prepared: Prepared) -> dict[str, Tensor]:
        """What `forward` gives for the ids that were prepared."""
        started = own_prepared(prepared, Started)
        self._settle()
        if self._managed is not None and started.mapped is not None:
            if started.mapped.version != self._managed.version:  # a round ended since: ids may have other rows
                started.wait()
                assert started.given is not None
                started = self._prepare(started.given, count=False)
            assert started.mapped is not None
            with on_stream(self._stream):
                self._managed.taken(started.mapped)
        rows, kept = started.rows, started.kept
        self._dense.finish()
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
            if self._managed is not None and started.mapped is not None:
                out = self._managed.guard(out, started.mapped)
        for spec in self.specs:
            if spec.pooling == "mean":
                out.update({feature: _divide_by_length(out[feature], ids, feature) for feature in spec.features})
        return self._policies.fill_in(out, kept)

    def table_state(self) -> dict[str, dict[str, Tensor]]:
        """Table name -> {"weight", "momentum"}, whole, on CPU, on every rank. A collective: all ranks must call it."""
        self._settle()
        self._dense.finish()
        local: dict[str, list[tuple[LocalTable, tuple[Tensor, Tensor]]]] = {}
        for table, parts in zip(self._copies.tables, self._copies.state(), strict=True):
            local.setdefault(table.name, []).append((table, parts))
        dense = {table.name: table for table in self._dense.tables}
        found: dict[str, dict[str, Tensor]] = {}
        for name, shapes in self.state_shapes().items():  # one at a time: the device may not hold them all whole
            if name in dense:  # the same on every rank
                found[name] = {key: getattr(dense[name], key).to("cpu", copy=True) for key in shapes}
            else:
                found[name] = self._whole(shapes, local.get(name, ()))
        return found

    def load_table_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Inverse of `table_state`; ValueError and no change if anything does not fit. Each rank takes its shards."""
        check_state(self.specs, state, self._parts)
        self._settle()
        self._dense.finish()
        parts = []
        for table in self._copies.tables:
            entry = state[table.name]
            parts.append((entry["weight"][table.block], table.moments_of(entry["momentum"])))
        self._copies.load(parts)
        for whole in self._dense.tables:
            whole.weight.copy_(state[whole.name]["weight"])
            whole.momentum.copy_(state[whole.name]["momentum"])

    def state_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Table name -> {"weight", "momentum"} -> shape."""
        return state_shapes(self.specs, self._parts)

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of every table from the next forward on."""
        check_learning_rate(lr)
        self._dense.set_learning_rate(lr)
        self._copies.set_learning_rate(lr)

    def placement(self) -> dict[str, str]:
        """Table name -> how it lies on the ranks of one copy."""
        size = dist.get_world_size(self.group)
        return {name: layout.describe(size) for name, layout in self._layouts.items()}

    def copied_parts(self) -> dict[str, Tensor]:
        """ "<table>.weight" and "<table>.momentum" of what this rank holds in copy; see the interface."""
        found = {}
        for table, parts in zip(self._copies.tables, self._copies.copied(), strict=False):
            for name, part in zip(("weight", "momentum"), parts, strict=True):
                found[f"{table.name}@{table.start},{table.column}.{name}"] = part
        self._dense.finish()
        for whole in self._dense.tables:  # without copies; all ranks hold it
            found |= {f"{whole.name}.weight": whole.weight, f"{whole.name}.momentum": whole.momentum}
        if self._managed is not None:
            if self._stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._stream)  # maps change on it
            found |= self._managed.copied_parts()
        return found

    def policy_counts(self) -> dict[str, dict[str, int]]:
        """Feature -> {"ids", "outside"} where the policy is not "error"; this rank's batches."""
        if self._stream is not None:
            self._stream.synchronize()  # they are counted on it
        return self._policies.counts() | ({} if self._managed is None else self._managed.counts())

    def id_state(self) -> dict[str, dict[str, Tensor]]:
        """Table name -> the map of a managed table; see the interface."""
        self._settle()
        with on_stream(self._stream):
            return {} if self._managed is None else self._managed.state()

    def id_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Table name -> shapes of `id_state`, -1: any length."""
        return {} if self._managed is None else self._managed.shapes()

    def load_id_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Inverse of `id_state`; ValueError and no change if anything does not fit."""
        if self._managed is not None:
            with on_stream(self._stream):
                self._managed.load(state)
        elif state:
            check_id_state({}, state)

    def _settle(self) -> None:
        """Count the ids that were trained, and start evicted rows anew. A collective where a round is over.

        On CUDA the maps live on the stream that ids are prepared on, so that counting does not wait for the model.
        """
        if self._managed is None:
            return
        with on_stream(self._stream):
            evicted = self._managed.settle()
        if evicted and self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for _, rows_U in evicted:  # else its memory could be given to the next batch while it is still read
                rows_U.record_stream(current)
        for name, rows_U in evicted:
            self._reset(name, rows_U)

    def _reset(self, name: str, rows_U: Tensor) -> None:
        """Rows of a table to their start values, moments to 0, where they are on this rank."""
        self._dense.finish()
        spec = next(spec for spec in self.specs if spec.name == name)
        for number, table in enumerate(self._copies.tables):
            if table.name == name:
                rows, columns = table.block
                own_U = rows_U[(rows_U >= rows.start) & (rows_U < rows.stop)]
                values_UD = initial_values(spec, own_U, seed=self._seed)[:, columns]
                self._copies.reset(number, own_U - rows.start, values_UD.to(self.device))
        for whole in self._dense.tables:
            if whole.name == name:
                whole.weight[rows_U] = initial_values(spec, rows_U, seed=self._seed).to(self.device)
                whole.momentum[rows_U] = 0.0

    def _whole(
        self, shapes: Mapping[str, tuple[int, ...]], local: Sequence[tuple[LocalTable, tuple[Tensor, Tensor]]]
    ) -> dict[str, Tensor]:
        """A table of all ranks, on the CPU, of the blocks that are here. A collective."""
        whole = {key: torch.zeros(shape, device=self.device) for key, shape in shapes.items()}
        for table, (weight, momentum) in local:
            whole["weight"][table.block] = weight
            table.moments_of(whole["momentum"]).copy_(momentum)
        return {key: self._sum(entry) for key, entry in whole.items()}

    def _sum(self, whole: Tensor) -> Tensor:
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


def _make_copies(tables: Sequence[LocalTable], optimizer: RowWiseAdagrad, replicas: Replicas | None) -> Copies:
    if replicas is None:
        return SingleCopy(tables, optimizer)
    if replicas.fully_sharded:
        return (SlicedSums if replicas.sync == "gradients" else SlicedAverages)(tables, optimizer, replicas)
    return (SummedCopies if replicas.sync == "gradients" else AveragedCopies)(tables, optimizer, replicas)


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
