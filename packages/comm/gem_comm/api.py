"""The calls of gem_comm, by explicit name of the implementation. Nothing here runs at import.

topology = read_topology("h200_cluster")                         # or a file
placed = layout(MeshSpec(expert=2, shard=4, table_shard=8), topology)
meshes = build_meshes(placed, device="cuda")                     # a collective
comm = make_collectives(meshes, "expert", impl="torch")
rows = comm.all_gather(x)
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import torch

from gem_comm.counted import CountedCollectives, Traffic
from gem_comm.interface import Codec, Collectives, CommError, Meshes
from gem_comm.layouts import layout, strided_groups, tier_units
from gem_comm.meshes import build_meshes, exchange_hosts
from gem_comm.observed import observe_traffic
from gem_comm.probing import probe_topology
from gem_comm.quantized import QuantizedCollectives, make_codec
from gem_comm.single import SingleCollectives
from gem_comm.topology_toml import parse_topology, read_topology, shipped_topologies, to_toml
from gem_comm.torch_collectives import TorchCollectives
from gem_comm.traced import Trace, TracedCollectives, check_traces
from gem_comm.validation import check_axis, did_you_mean

Impl = Literal["single", "torch", "peer_copy"]
IMPLS: tuple[Impl, ...] = ("single", "torch", "peer_copy")


def make_collectives(
    meshes: Meshes,
    axis: str,
    *,
    impl: Impl,
    codec: str | Codec | None = None,
    traffic: Traffic | None = None,
    trace: Trace | None = None,
    limit: timedelta | None = None,
    device: torch.device | None = None,
) -> Collectives:
    """Collectives over this rank's group of `axis`.

    impl     "single": a group of one rank, no process group behind it. "torch": gloo or NCCL. "peer_copy": all-gather
             by the copy engines over symmetric memory, the rest by NCCL; CUDA, one host (see peer_copy.py)
    codec    "bf16", "fp8" or "int8" (or a Codec): floating-point payloads of all_gather, reduce_scatter and all_to_all
             travel coded, sums are made in float32
    traffic  count calls and bytes into it, as they travel (after coding)
    trace    record every call into it, for `check_traces`
    limit    how long one call may take; None: the process group's own limit

    Raises CommError for an unknown axis or implementation, and where the implementation cannot run, saying why.
    """
    check_axis(axis, meshes.process_groups)
    group = meshes.process_groups[axis]
    comm: Collectives
    if impl == "single":
        if group.size() != 1:
            raise CommError(f"impl='single' is for one rank; axis {axis!r} has {group.size()}: use impl='torch'")
        comm = SingleCollectives(axis=axis, global_rank=meshes.rank)
    elif impl == "torch":
        comm = TorchCollectives(group, axis=axis, limit=limit)
    elif impl == "peer_copy":
        from gem_comm.peer_copy import PeerCopyCollectives

        comm = PeerCopyCollectives(TorchCollectives(group, axis=axis, limit=limit), group=group, device=device)
    else:
        raise CommError(f"unknown impl {impl!r}; {did_you_mean(str(impl), IMPLS)}")
    return wrap(comm, codec=codec, traffic=traffic, trace=trace)


def wrap(
    comm: Collectives,
    *,
    codec: str | Codec | None = None,
    traffic: Traffic | None = None,
    trace: Trace | None = None,
) -> Collectives:
    """Put counting around `comm`, coding around that, tracing around all: bytes are counted as they travel, and the
    trace shows what the caller asked for."""
    if traffic is not None:
        comm = CountedCollectives(comm, traffic)
    if codec is not None:
        comm = QuantizedCollectives(comm, make_codec(codec) if isinstance(codec, str) else codec)
    if trace is not None:
        comm = TracedCollectives(comm, trace)
    return comm


__all__ = [
    "IMPLS",
    "Impl",
    "Trace",
    "Traffic",
    "build_meshes",
    "check_traces",
    "exchange_hosts",
    "layout",
    "make_codec",
    "make_collectives",
    "observe_traffic",
    "parse_topology",
    "probe_topology",
    "read_topology",
    "shipped_topologies",
    "strided_groups",
    "tier_units",
    "to_toml",
    "wrap",
]
