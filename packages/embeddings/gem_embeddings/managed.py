"""Dynamic ids: tables whose ids are any integers, and whose rows are earned (zero-collision hashing, TorchRec's ZCH).

A managed table of R rows has a map from at most R - 1 ids to rows. An id that is not in the map looks up the last row,
which all such ids share. Ids that were trained are counted; every `interval` trained lookups TorchRec's eviction policy
(`torchrec.modules.mc_modules`: LFU, LRU, distance-LFU) compares the ids in the map with those that were seen since the
last round, and decides which of them get the rows of which. The rows of evicted ids go back to their start values, and
their moments to 0, so that a newcomer inherits nothing.

The policies are TorchRec's; the rest is not, since its sharded module (`ShardedManagedCollisionCollection`)
- lets every rank manage its own share of ids and rows, so that what is kept depends on the number of ranks,
- takes tables cut by rows only, and no copies: each copy would learn another map,
- counts an id when it is sent, so that ids sent ahead, or of a step that is left out, or looked up by an evaluation in
  training mode, are counted too; and drops ids once a buffer, sized by the first batch, is full.
Here the map stands before the exchange of ids, is the same on every rank, and changes between two steps only:

    prepare   ids -> rows, by the map as it is; nothing is counted
    backward  the lookup's ids are noted (a forward without backward, as in evaluation, notes nothing)
    settle    before the next lookup or when state is asked for: noted ids are counted; at the end of a round all ranks'
              counts are summed and every rank makes the same decision. Rows prepared before that are prepared anew.

So any sharding, any copies and any number of ranks have the same map, bit for bit, which is what one process has.

Cost: 24 to 32 bytes a row on every rank (a quarter of a row of dim 32). Per lookup a binary search an id; per round one
gather of the distinct ids seen, 24 bytes each, a sort of the map, and the start values of evicted rows: on the host,
where whole blocks of 65,536 rows are drawn however few of a block are needed, 42 ms a block of dim 64. Evictions all
over a table of 10 million such rows hold every rank for about 6 s a round: for tables of some million rows, or rounds
that are long beside that.

Letters: N ids, U distinct ids, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.interface import Exchange, ManagedIds, TableSpec

FREE = torch.iinfo(torch.int64).max
"""The id that a free row has in the map; an id of this value is never in it."""

MAP = ("ids", "rows")
SEEN = ("seen_ids", "seen_counts", "seen_last")


class IdMap:
    """The map of one table, and the ids that this rank trained since the last round."""

    def __init__(self, rows: int, how: ManagedIds, device: torch.device) -> None:
        self.how, self._size, self._device = how, rows, device
        self._policy = _policy(how)
        self.ids_R = torch.full((rows,), FREE, device=device)  # ascending; the last is always FREE
        self.rows_R = torch.arange(rows, device=device)
        self.about = {
            info.metadata_name: torch.zeros(rows, dtype=torch.int64, device=device)
            for info in self._policy.metadata_info
            if info.is_mch_metadata
        }
        self.steps = 0
        self._seen: list[Tensor] = []
        self.inserted = self.evicted = 0

    def look_up(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """(rows (N,), which ids are in the map (N,) bool)."""
        ids_N = ids_N.long()
        at_N = torch.searchsorted(self.ids_R[:-1], ids_N)
        known_N = (self.ids_R[at_N] == ids_N) & (ids_N != FREE)
        return torch.where(known_N, self.rows_R[at_N], self._size - 1), known_N

    def note(self, ids_N: Tensor) -> None:
        """Ids of one trained lookup."""
        self.steps += 1
        ids_N = ids_N.long()
        self._seen.append(_counted(ids_N[ids_N != FREE], self.steps))
        if sum(part.shape[1] for part in self._seen[1:]) > self._seen[0].shape[1]:
            self._seen = [_merged(self._seen)]

    def seen(self) -> Tensor:
        """(3, U): distinct ids, how often, and the last step, of this rank since the last round."""
        self._seen = (
            [_merged(self._seen)] if self._seen else [torch.zeros(3, 0, dtype=torch.int64, device=self._device)]
        )
        return self._seen[0]

    @property
    def round_is_over(self) -> bool:
        return self.steps > 0 and self.steps % self.how.interval == 0

    def decide(self, seen_3U: Tensor) -> Tensor:
        """End a round with what all ranks saw: the map changes. Rows of ids that lost theirs, ascending."""
        self._seen = []
        ids_U, counts_U, last_U = seen_3U.unbind()
        order_U = torch.argsort(counts_U, descending=True, stable=True)
        by_count_U = ids_U[order_U]
        at_U = torch.searchsorted(self.ids_R[:-1], by_count_U)
        known_U = self.ids_R[at_U] == by_count_U
        lost, gained = self._policy.update_metadata_and_generate_eviction_scores(
            self.steps,
            self._size,
            order_U,
            counts_U[order_U],
            known_U,
            at_U[known_U],
            self.about,
            {"last_access_iter": last_U.clone()},
        )
        evicted = self.rows_R[lost[self.ids_R[lost] != FREE]]
        self.inserted += lost.numel()
        self.evicted += evicted.numel()
        self.ids_R[lost] = by_count_U[~known_U][gained]
        order_R = torch.argsort(self.ids_R, stable=True)
        for part in (self.ids_R, self.rows_R, *self.about.values()):
            part.copy_(part[order_R])
        return evicted.sort().values

    def state(self, seen_3U: Tensor) -> dict[str, Tensor]:
        """Whole state on the CPU. seen: of all ranks."""
        found = {"ids": self.ids_R, "rows": self.rows_R, **self.about, "steps": torch.tensor([self.steps])}
        found |= dict(zip(SEEN, seen_3U.unbind(), strict=True))
        return {name: part.to("cpu", copy=True) for name, part in found.items()}

    def load(self, state: Mapping[str, Tensor], *, holds_seen: bool) -> None:
        """Inverse of `state`. holds_seen: on the one rank that counts what all ranks had seen."""
        for name, part in {"ids": self.ids_R, "rows": self.rows_R, **self.about}.items():
            part.copy_(state[name])
        self.steps = int(state["steps"])
        seen = torch.stack([state[name] for name in SEEN]).to(self._device)
        self._seen = [seen if holds_seen else seen[:, :0]]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of `state`; -1: any length."""
        found = dict.fromkeys((*MAP, *self.about), (self._size,))
        return {**found, "steps": (1,), **dict.fromkeys(SEEN, (-1,))}


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """A batch whose ids are rows. version: of the maps; trained: table -> its ids as given; counts: feature -> (ids
    but FREE, of these in the map), scalars.
    """

    ids: KeyedJaggedTensor
    version: int
    trained: Mapping[str, Tensor]
    counts: Mapping[str, tuple[Tensor, Tensor]]


class ManagedTables:
    """All managed tables of one process. specs: under own feature names (sharing.py)."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        managed: Mapping[str, ManagedIds],
        *,
        group: Any,
        exchange: Exchange | None,
        device: torch.device,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs if spec.name in managed}
        self.maps = {name: IdMap(spec.rows, managed[name], device) for name, spec in self._specs.items()}
        self._group, self._exchange, self._device = group, exchange, device
        self._due: list[Mapping[str, Tensor]] = []
        self._ids: dict[str, Tensor | int] = {f: 0 for spec in self._specs.values() for f in spec.features}
        self._hits: dict[str, Tensor | int] = dict.fromkeys(self._ids, 0)
        self.version = 0

    def apply(self, ids: KeyedJaggedTensor) -> Mapped:
        """The batch with rows in place of managed ids. ValueError where a feature is missing."""
        keys = ids.keys()
        missing = [feature for feature in self._ids if feature not in keys]
        if missing:
            raise ValueError(f"the batch lacks features {missing}; it has {keys}")
        values = list(ids.values().split(ids.length_per_key()))
        trained, counts = {}, {}
        for name, spec in self._specs.items():
            trained[name] = torch.cat([values[keys.index(feature)] for feature in spec.features])
            for feature in spec.features:
                given_N = values[keys.index(feature)]
                rows_N, known_N = self.maps[name].look_up(given_N)
                values[keys.index(feature)] = rows_N.to(given_N.dtype)
                counts[feature] = ((given_N.long() != FREE).sum(), known_N.sum())  # FREE pads, and is no id
        mapped = KeyedJaggedTensor(
            keys=keys, values=torch.cat(values), lengths=ids.lengths(), weights=ids.weights_or_none()
        )
        return Mapped(ids=mapped, version=self.version, trained=trained, counts=counts)

    def taken(self, mapped: Mapped) -> None:
        """The batch is looked up now: count its ids and hits."""
        for feature, (number, hits) in mapped.counts.items():
            self._ids[feature] = self._ids[feature] + number
            self._hits[feature] = self._hits[feature] + hits

    def guard(self, vectors: dict[str, Tensor], mapped: Mapped) -> dict[str, Tensor]:
        """`vectors`, whose backward notes the batch's ids as trained."""
        noted = _Note.apply(self._due, mapped.trained, *vectors.values())  # type: ignore[no-untyped-call]
        return dict(zip(vectors, noted, strict=True))

    def settle(self) -> list[tuple[str, Tensor]]:
        """Count what was trained, change maps where a round is over: (table, evicted rows), if any. A collective."""
        due, self._due[:] = list(self._due), []
        found = []
        for trained in due:
            for name, ids_N in trained.items():
                self.maps[name].note(ids_N)
                if self.maps[name].round_is_over:
                    evicted = self.maps[name].decide(self._of_all_ranks(self.maps[name].seen()))
                    self.version += 1
                    if evicted.numel():
                        found.append((name, evicted))
        return found

    def counts(self) -> dict[str, dict[str, int]]:
        """Feature -> ids, outside (looked up the shared row), and inserted and evicted of its table."""
        found = {}
        for name, spec in self._specs.items():
            rounds = {"inserted": self.maps[name].inserted, "evicted": self.maps[name].evicted}
            for feature in spec.features:
                ids = int(self._ids[feature])
                found[feature] = {"ids": ids, "outside": ids - int(self._hits[feature]), **rounds}
        return found

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Table -> state; a collective."""
        return {name: own.state(self._of_all_ranks(own.seen())) for name, own in self.maps.items()}

    def copied_parts(self) -> dict[str, Tensor]:
        """The maps' memory, the same on all ranks."""
        parts = {name: {"ids": own.ids_R, "rows": own.rows_R, **own.about} for name, own in self.maps.items()}
        return {f"{name}.{part}": value for name, own in parts.items() for part, value in own.items()}

    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        return {name: own.shapes() for name, own in self.maps.items()}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Inverse of `state`; ValueError and no change where something does not fit."""
        check_id_state(self.shapes(), state)
        first = (self._group is None or dist.get_rank(self._group) == 0) and (
            self._exchange is None or self._exchange.rank == 0
        )
        self._due.clear()
        self.version += 1
        for name, own in self.maps.items():
            own.load(state[name], holds_seen=first)

    def _of_all_ranks(self, seen_3U: Tensor) -> Tensor:
        if self._group is not None and dist.get_world_size(self._group) > 1:
            size = dist.get_world_size(self._group)

            def gather(x: Tensor) -> Tensor:
                parts = [torch.empty_like(x) for _ in range(size)]
                dist.all_gather(parts, x, group=self._group)
                return torch.cat(parts)

            seen_3U = _gathered(seen_3U, gather, size)
        if self._exchange is not None:
            seen_3U = _gathered(seen_3U, self._exchange.all_gather, self._exchange.size)
        return seen_3U


class _Note(torch.autograd.Function):
    """Identity on the vectors of one lookup; backward notes its ids."""

    @staticmethod
    def forward(ctx: Any, due: list[Any], trained: Any, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.due, ctx.trained = due, trained
        return tuple(vector.view_as(vector) for vector in vectors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.due.append(ctx.trained)
        return (None, None, *grads)


def _policy(how: ManagedIds) -> Any:
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, LFU_EvictionPolicy, LRU_EvictionPolicy

    if how.policy == "lfu":
        return LFU_EvictionPolicy()
    kind = LRU_EvictionPolicy if how.policy == "lru" else DistanceLFU_EvictionPolicy
    return kind(decay_exponent=how.decay_exponent)


def _counted(ids_N: Tensor, step: int) -> Tensor:
    ids_U, counts_U = ids_N.unique(return_counts=True)
    return torch.stack([ids_U, counts_U, torch.full_like(ids_U, step)])


def _merged(parts: Sequence[Tensor]) -> Tensor:
    """(3, U) of several: distinct ids ascending, counts summed, the latest step.

    Example: ids [4, 7] with counts [1, 2] of step 1, and [7] with count 1 of step 2: [4, 7], [1, 3], [1, 2].
    """
    ids_N, counts_N, last_N = torch.cat(list(parts), dim=1).unbind()
    ids_U, place_N = ids_N.unique(return_inverse=True)
    counts_U = torch.zeros_like(ids_U).index_add_(0, place_N, counts_N)
    last_U = torch.zeros_like(ids_U).scatter_reduce_(0, place_N, last_N, reduce="amax")
    return torch.stack([ids_U, counts_U, last_U])


def _gathered(seen_3U: Tensor, gather: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """`_merged` over ranks whose numbers of ids differ."""
    counts = gather(torch.tensor([seen_3U.shape[1]], device=seen_3U.device)).tolist()
    if not max(counts):
        return seen_3U
    padded = seen_3U.new_zeros(max(counts), 3)
    padded[: seen_3U.shape[1]] = seen_3U.t()
    every = gather(padded).view(size, max(counts), 3)
    return _merged([part[:count].t() for part, count in zip(every, counts, strict=True)])


def check_managed(specs: Sequence[TableSpec], managed: Mapping[str, ManagedIds], policies: Mapping[str, str]) -> None:
    """Raise ValueError listing managed tables that cannot be."""
    by_name, problems = {spec.name: spec for spec in specs}, []
    for name, how in managed.items():
        if name not in by_name:
            problems.append(f"managed ids name table {name!r}; the tables are {sorted(by_name)}")
            continue
        if how.policy not in ("lfu", "lru", "distance_lfu"):
            problems.append(f"table {name!r}: policy must be 'lfu', 'lru' or 'distance_lfu', got {how.policy!r}")
        if how.interval < 1 or not 0 < how.decay_exponent < float("inf"):
            problems.append(
                f"table {name!r}: interval must be at least 1 and decay_exponent above 0, got {how.interval} and "
                f"{how.decay_exponent}"
            )
        if by_name[name].rows < 2:
            problems.append(f"table {name!r}: managed ids need at least 2 rows (the last is for all others)")
        problems += [
            f"feature {feature!r}: policy {policies[feature]!r}, but ids of table {name!r} are managed and need none"
            for feature in by_name[name].features
            if policies.get(feature, "error") != "error"
        ]
    if problems:
        raise ValueError("managed ids do not fit:\n  " + "\n  ".join(problems))


def check_id_state(
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]], state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Raise ValueError listing everything in which a state is not one of these maps."""
    problems = [f"table {name!r} has no map" for name in state if name not in shapes]
    for name, parts in shapes.items():
        entry = state.get(name, {})
        problems += [f"table {name!r}: unknown entry {key!r}" for key in entry if key not in parts]
        for key, shape in parts.items():
            if key not in entry:
                problems.append(f"table {name!r}: {key} is missing")
            elif entry[key].dtype != torch.int64 or entry[key].ndim != 1 or shape[0] not in (-1, entry[key].shape[0]):
                came = f"{tuple(entry[key].shape)} {entry[key].dtype}"
                problems.append(f"table {name!r}: {key} should be {shape} torch.int64, got {came}")
    if problems:
        raise ValueError("id maps do not fit, nothing was loaded:\n  " + "\n  ".join(sorted(problems)))
