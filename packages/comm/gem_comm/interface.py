"""What gem_comm promises: a cluster as tiers, ranks laid out on it, and collectives over one axis of the mesh.

1.0  first version
1.1  Collectives.begin
1.2  the suite's `check_codec` bounds a codec's bound
1.3  `check_codec(error_floor=...)`; `Codec` states what its bound is held against

Words: a *tier* is a level of the network (host, zone, spine), fastest first. An *axis* is a dimension of a mesh. A
*group* is the ranks that differ in one axis only; collectives run over groups. The dense model and the tables divide
the same ranks in two ways:

    dense   expert x shard x replicate              tables   table_shard x table_replica

Bytes are bytes; bandwidths are bytes per second, per direction and rank; times are seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gem_comm import validation

INTERFACE_VERSION = (1, 3)

DENSE_AXES = ("expert", "shard", "replicate")
TABLE_AXES = ("table_shard", "table_replica")

Axis = Literal["expert", "shard", "replicate", "table_shard", "table_replica", "shard_expert", "world"]
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier"]
Reduction = Literal["sum", "mean", "max", "min"]


class CommError(ValueError):
    """A mistake in topology, mesh or a collective's arguments, or a group that does not work: says which and what to
    do."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One level of the network.

    name                   "host", "zone", "spine"
    group_size             ranks within one unit of this tier; None: all ranks (the last tier only)
    bandwidth_bytes_per_s  what one rank reaches in one direction
    latency_s              one step of a collective: launch and travel of a small message
    oversubscription       by how much the bandwidth is divided when all ranks use the tier at once; 4 for 4:1
    """

    name: str
    group_size: int | None
    bandwidth_bytes_per_s: float
    latency_s: float
    oversubscription: float = 1.0

    @property
    def shared_bandwidth(self) -> float:
        """Bytes per second and rank with all ranks at work."""
        return self.bandwidth_bytes_per_s / self.oversubscription


@dataclass(frozen=True, kw_only=True)
class Device:
    """What sits at each rank, for planning.

    flops_per_s         peak that a model's utilisation is stated against
    memory_bytes        memory that a job may fill
    memory_bytes_per_s  bandwidth of that memory, read plus write
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A cluster: tiers from the fastest to the slowest, each a whole number of units of the one before.

    source says where the figures come from: measured, a data sheet, or assumed.
    """

    name: str
    tiers: tuple[Tier, ...]
    device: Device | None = None
    source: str = ""

    def __post_init__(self) -> None:
        validation.check_topology(self)


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Sizes of the five axes. Both products equal the world size.

    expert         ranks that share their samples, each owning some of the experts
    shard          ranks over which dense parameters, gradients and optimizer state are cut
    replicate      copies of the dense model
    table_shard    ranks that hold one copy of all tables together
    table_replica  copies of the tables
    fully_sharded  between steps each rank keeps 1 / table_replica of its part of a copy
    """

    expert: int = 1
    shard: int = 1
    replicate: int = 1
    table_shard: int = 1
    table_replica: int = 1
    fully_sharded: bool = False

    def __post_init__(self) -> None:
        validation.check_mesh_spec(self)

    @property
    def world_size(self) -> int:
        """Ranks that the dense axes need; `check_world` holds the tables' axes and a launch against it."""
        return self.expert * self.shard * self.replicate

    def check_world(self, world_size: int) -> None:
        """Raise CommError with both products unless both are `world_size`."""
        validation.check_world(self, world_size)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each rank stands, worked out on paper: no process group, no device.

    groups  axis -> all its groups, each the ranks in ascending order; together they hold each rank once. Beside the
            five axes: "shard_expert" (what cuts the parameters that are no expert's) and "world"
    tiers   axis -> name of the slowest tier that one of its groups spans; the fastest where groups have one rank
    order   axes from fastest to slowest, for the dense part and for the tables

    Example: 8 ranks, expert 2 x shard 2 x replicate 2. Rank = (replicate * 2 + shard) * 2 + expert, so rank 5 is
    expert 1, shard 0, replicate 1; its groups are expert (4, 5), shard (5, 7), replicate (1, 5) and shard_expert
    (4, 5, 6, 7).
    """

    spec: MeshSpec
    world_size: int
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    tiers: Mapping[str, str]
    order: tuple[tuple[str, ...], tuple[str, ...]]

    def coordinate(self, rank: int) -> dict[str, int]:
        """axis -> position of `rank` on it."""
        return {axis: self.group_of(rank, axis).index(rank) for axis in (*DENSE_AXES, *TABLE_AXES)}

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks of the group of `axis` that contains `rank`."""
        validation.check_axis(axis, self.groups)
        for group in self.groups[axis]:
            if rank in group:
                return group
        raise CommError(f"rank {rank} is not in a world of {self.world_size}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Meshes:
    """Process groups of this rank, made and tried; see `api.build_meshes`.

    process_groups  axis -> this rank's process group; axes over the same ranks share one
    shared          mesh for FSDP2 of all parameters that are no expert's: ("shard_expert",), or with copies
                    ("replicate", "shard_expert")
    experts         mesh for FSDP2 of this rank's experts: ("shard",) or ("replicate", "shard")
    tables          ("table_replica", "table_shard")
    """

    layout: Layout
    rank: int
    process_groups: Mapping[str, ProcessGroup]
    shared: DeviceMesh
    experts: DeviceMesh
    tables: DeviceMesh


# ------------------------------------------------------------------------------------------------ collectives


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One collective, as data, so that whatever counts, traces or encodes wraps a single method.

    kind, x       n = size of the group; all tensors have at least one dim and the same trailing dims on all ranks
        all_gather      x (r, ...)      -> (n * r, ...), in the order of ranks
        reduce_scatter  x (n * r, ...)  -> (r, ...): the reduction of everybody's rows rank * r : (rank + 1) * r
        all_reduce      x               -> same shape
        all_to_all      x (sum(send_rows), ...) -> (sum(receive_rows), ...): send_rows[j] rows go to rank j
        broadcast       x               -> same shape, the values of rank `source` (position within the group)
        barrier         no tensor
    op            reduction of reduce_scatter and all_reduce
    out           where the result goes (all_gather, reduce_scatter); may be memory that x is a part of

    Example, all_to_all at n = 2: rank 0 has rows [a, b, c] and send_rows (1, 2); rank 1 has [d] and send_rows (1, 0).
    Rank 0 receives [a, d] (receive_rows (1, 1)), rank 1 receives [b, c] (receive_rows (2, 0)).
    """

    kind: Kind
    x: Tensor | None = None
    op: Reduction = "sum"
    send_rows: tuple[int, ...] = ()
    receive_rows: tuple[int, ...] = ()
    source: int = 0
    out: Tensor | None = None


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """The result. On CUDA the current stream waits, not the host. Call once."""
        ...


class Collectives(ABC):
    """Collectives over one group. An implementation sets the four attributes and writes `launch`.

    axis   name of the axis, for messages and counts
    ranks  global ranks of the group, ascending
    rank   this process's position within `ranks`
    size   len(ranks)

    All ranks of the group issue the same calls in the same order, ranks without rows too. Nothing here
    differentiates: `gem_comm.differentiable` does. Results are new tensors unless `out` is given.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    size: int

    @abstractmethod
    def launch(self, call: Call) -> Pending:
        """Begin a call that `start` has checked."""

    def start(self, call: Call) -> Pending:
        """Check and begin a call; compute meanwhile, then `wait()`. CommError says what is wrong with it."""
        validation.check_call(self, call)
        return self.launch(call)

    def begin(self, kind: Kind, x: Tensor) -> Pending:
        """Begin a call that is told by its kind and x alone: a sum for reductions."""
        return self.start(Call(kind=kind, x=x))

    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Rows of all ranks: (r, ...) -> (n * r, ...)."""
        return self.start(Call(kind="all_gather", x=x, out=out)).wait()

    def reduce_scatter(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """This rank's part of the reduction: (n * r, ...) -> (r, ...)."""
        return self.start(Call(kind="reduce_scatter", x=x, op=op, out=out)).wait()

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum") -> Tensor:
        """The reduction on every rank; x is left alone."""
        return self.start(Call(kind="all_reduce", x=x, op=op)).wait()

    def all_to_all(self, x: Tensor, *, send_rows: Sequence[int], receive_rows: Sequence[int]) -> Tensor:
        """send_rows[j] rows to each rank j, receive_rows[j] from it."""
        call = Call(kind="all_to_all", x=x, send_rows=tuple(send_rows), receive_rows=tuple(receive_rows))
        return self.start(call).wait()

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        """The values of the rank at position `source`."""
        return self.start(Call(kind="broadcast", x=x, source=source)).wait()

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        self.start(Call(kind="barrier")).wait()


class Codec(Protocol):
    """Rows of floating-point numbers as bytes: what travels instead of them. Each row stands alone.

    encode(x_RD)         (R, D) floating point -> (R, row_bytes(D)) uint8
    decode(payload, D)   -> (R, D) float32
    row_bytes(D)         bytes of one coded row
    error_bound(x_RD)    (R, D) float32: decode(encode(x)) differs from x by at most this, element by element

    A row of zeros decodes to zeros, of either sign. The bound is a share of the row's largest number, below 1, plus
    what is lost whatever the row's size: `testing.check_codec` holds it against 2^(1 - b / 2) of that number at b bits
    a number (at most half) plus 1e-9; a codec that loses more says its own `error_share` and `error_floor` there.
    A row that holds an infinity or NaN decodes to NaN or the same infinity where it stood, never to a finite number.
    """

    name: str

    def encode(self, x_RD: Tensor) -> Tensor: ...

    def decode(self, payload_RP: Tensor, columns: int) -> Tensor: ...

    def row_bytes(self, columns: int) -> int: ...

    def error_bound(self, x_RD: Tensor) -> Tensor: ...
