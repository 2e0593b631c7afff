"""What is refused, and why: one place, so that every implementation gives the same errors."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gem_comm.interface import Call, Collectives, MeshSpec, Topology


def error(message: str) -> Exception:
    """CommError lives in interface.py, which imports this file."""
    from gem_comm.interface import CommError

    return CommError(message)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise error(message)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Example: did_you_mean("latency", ["latency_s", "name"]) is "did you mean 'latency_s'?"."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(names)}"


def _positive(what: str, value: object) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    _require(ok, f"{what} is {value!r}, expected a finite number above 0")


def check_topology(topology: Topology) -> None:
    """Tiers fastest first, each a multiple of the one before, only the last without a size."""
    where = f"topology {topology.name!r}"
    _require(len(topology.tiers) > 0, f"{where} has no tier; give at least one [[tier]]")
    names = [tier.name for tier in topology.tiers]
    _require(len(set(names)) == len(names), f"{where}: tier names repeat: {names}")
    before = 1
    for number, tier in enumerate(topology.tiers):
        what = f"{where}, tier {tier.name!r}"
        _positive(f"{what}: bandwidth_bytes_per_s", tier.bandwidth_bytes_per_s)
        _positive(f"{what}: oversubscription", tier.oversubscription)
        _require(tier.oversubscription >= 1, f"{what}: oversubscription is {tier.oversubscription}, expected >= 1")
        _require(
            math.isfinite(tier.latency_s) and tier.latency_s >= 0,
            f"{what}: latency_s is {tier.latency_s}, expected a finite number >= 0",
        )
        last = number == len(topology.tiers) - 1
        if tier.group_size is None:
            _require(last, f"{what} has no group_size; only the last tier may leave it out (all ranks)")
            continue
        _require(
            tier.group_size >= before and tier.group_size % before == 0,
            f"{what}: group_size is {tier.group_size}, expected a multiple of {before}, the size of the tier before; "
            "tiers go from the fastest and smallest to the slowest and largest",
        )
        before = tier.group_size
    if topology.device is not None:
        for name in ("flops_per_s", "memory_bytes", "memory_bytes_per_s"):
            _positive(f"{where}, device: {name}", getattr(topology.device, name))


def check_mesh_spec(spec: MeshSpec) -> None:
    """Sizes are whole numbers of at least 1."""
    for axis in ("expert", "shard", "replicate", "table_shard", "table_replica"):
        size = getattr(spec, axis)
        ok = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        _require(ok, f"mesh: {axis} is {size!r}, expected a whole number >= 1")


def check_world(spec: MeshSpec, world_size: int) -> None:
    """Both products are `world_size`."""
    dense = spec.expert * spec.shard * spec.replicate
    tables = spec.table_shard * spec.table_replica
    _require(
        dense == tables == world_size,
        f"the mesh does not fit {world_size} ranks: expert {spec.expert} x shard {spec.shard} x replicate "
        f"{spec.replicate} = {dense}, table_shard {spec.table_shard} x table_replica {spec.table_replica} = {tables}; "
        f"both products must be {world_size}",
    )


def check_axis(axis: str, valid: Mapping[str, object]) -> None:
    _require(axis in valid, f"unknown axis {axis!r}; {did_you_mean(axis, valid)}")


# ------------------------------------------------------------------------------------------------ collectives


def check_call(comm: Collectives, call: Call) -> None:
    """Shapes, counts and operation of one call on this rank; reads no value of a tensor."""
    what = f"{call.kind} over {comm.axis} ({comm.size} ranks)"
    if call.kind == "barrier":
        _require(call.x is None, f"{what} takes no tensor")
        return
    if call.x is None:
        raise error(f"{what} needs a tensor x")
    x = call.x
    _require(x.dim() >= 1, f"{what}: x has no dim; give shape (1,) for a single number")
    if call.kind == "reduce_scatter":
        _require(
            x.shape[0] % comm.size == 0,
            f"{what}: x has {x.shape[0]} rows, which {comm.size} ranks cannot share evenly; pad the rows",
        )
    if call.kind in ("reduce_scatter", "all_reduce"):
        _require(call.op in ("sum", "mean", "max", "min"), f"{what}: op is {call.op!r}, expected sum, mean, max or min")
        _require(
            call.op != "mean" or x.dtype.is_floating_point,
            f"{what}: the mean of {x.dtype} is not {x.dtype}; convert x or use op='sum'",
        )
    if call.kind == "all_to_all":
        _check_rows(what, "send_rows", call.send_rows, comm.size)
        _check_rows(what, "receive_rows", call.receive_rows, comm.size)
        total = sum(call.send_rows)
        _require(total == x.shape[0], f"{what}: x has {x.shape[0]} rows, send_rows {call.send_rows} add up to {total}")
        mine = (call.send_rows[comm.rank], call.receive_rows[comm.rank])
        _require(mine[0] == mine[1], f"{what}: this rank sends itself {mine[0]} rows and expects {mine[1]}")
    if call.kind == "broadcast":
        _require(0 <= call.source < comm.size, f"{what}: source is {call.source}, expected 0 to {comm.size - 1}")
    if call.out is not None:
        _check_out(what, call, comm.size, call.out)


def _check_rows(what: str, name: str, rows: tuple[int, ...], size: int) -> None:
    ok = len(rows) == size and all(isinstance(count, int) and count >= 0 for count in rows)
    _require(ok, f"{what}: {name} is {rows}, expected {size} whole numbers >= 0")


def _check_out(what: str, call: Call, size: int, out: Tensor) -> None:
    assert call.x is not None
    _require(call.kind in ("all_gather", "reduce_scatter"), f"{what} takes no out")
    rows = call.x.shape[0] * size if call.kind == "all_gather" else call.x.shape[0] // size
    shape = torch.Size((rows, *call.x.shape[1:]))
    ok = out.shape == shape and out.dtype == call.x.dtype and out.device == call.x.device and out.is_contiguous()
    _require(
        ok,
        f"{what}: out is {tuple(out.shape)} {out.dtype} on {out.device} (contiguous: {out.is_contiguous()}), expected "
        f"{tuple(shape)} {call.x.dtype} on {call.x.device}, contiguous",
    )
