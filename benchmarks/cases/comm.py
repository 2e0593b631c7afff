"""Coded payloads, the layout of a large mesh, and collectives over the axes of a small one."""

from __future__ import annotations

from functools import partial
from typing import Any

from cases.case import Case
from cases.counting import count_tensors, python_calls
from cases.ranks import run_ranks

ROWS, COLUMNS = 2048, 256


def make_rows(*, codec: str, shape: str) -> dict[str, Any]:
    """Rows of numbers; ragged: of magnitudes from 1e-4 to 1e4, a zero row among them; uniform: all alike."""
    import torch
    from gem_comm.api import make_codec

    generator = torch.Generator().manual_seed(7)
    x_RD = torch.randn(ROWS, COLUMNS, generator=generator)
    if shape == "ragged":
        x_RD *= torch.logspace(-4, 4, ROWS)[:, None]
        x_RD[5] = 0
    return {"codec": make_codec(codec), "x_RD": x_RD}


def run_codec(inputs: dict[str, Any]) -> Any:
    """There and back."""
    codec = inputs["codec"]
    return codec.decode(codec.encode(inputs["x_RD"]), COLUMNS)


def check_codec(inputs: dict[str, Any], decoded: Any) -> None:
    """Every number within the bound of its format, and within the one that the codec states; zeros stay zeros."""
    x_RD, codec = inputs["x_RD"], inputs["codec"]
    off_RD = (decoded - x_RD).abs()
    for name, bound_RD in (("its format", format_bound(codec.name, x_RD)), ("the codec", codec.error_bound(x_RD))):
        beyond = int((off_RD > bound_RD).sum())
        assert beyond == 0, f"{codec.name}: {beyond} of {x_RD.numel()} numbers are beyond the bound of {name}"
    zero_R = x_RD.abs().amax(1) == 0
    assert bool((decoded[zero_R] == 0).all())


def format_bound(name: str, x_RD: Any) -> Any:
    """What rounding to nearest costs, from the format and the row's largest number alone.

    int8  steps of scale = largest / 127: half a step, largest / 254
    fp8   e4m3 in units of scale = largest / 448: 3 bits of mantissa, half of the last is 2^-4 of the number; below the
          smallest normal number, 2^-6, steps of 2^-9: half of one
    Float32 rounds the scale, the quotient and the product: 3 times 2^-24 of the number, 2^-22 allowed.
    """
    import torch

    largest_R1 = x_RD.abs().amax(1, keepdim=True)
    if name == "int8":
        return largest_R1 / 254 + largest_R1 * 2.0**-22
    assert name == "fp8", name
    return torch.maximum(x_RD.abs() * 2.0**-4, largest_R1 / 448 * 2.0**-10) + x_RD.abs() * 2.0**-22


def wire_bytes(inputs: dict[str, Any]) -> dict[str, int]:
    """Bytes that would travel."""
    return {"wire_bytes": ROWS * inputs["codec"].row_bytes(COLUMNS)}


def make_layout() -> dict[str, Any]:
    """4,096 ranks on the cluster of 8-GPU hosts."""
    from gem_comm.api import read_topology
    from gem_comm.interface import MeshSpec

    spec = MeshSpec(expert=8, shard=64, replicate=8, table_shard=512, table_replica=8)
    return {"spec": spec, "topology": read_topology("h200_cluster")}


def run_layout(inputs: dict[str, Any]) -> Any:
    from gem_comm.api import layout

    return layout(inputs["spec"], inputs["topology"])


def check_layout(inputs: dict[str, Any], placed: Any) -> None:
    """Every axis holds each rank once, in groups of its size; experts stay within a host."""
    for axis in ("expert", "shard", "replicate", "table_shard", "table_replica"):
        groups = placed.groups[axis]
        assert {len(group) for group in groups} == {getattr(inputs["spec"], axis)}
        assert sorted(rank for group in groups for rank in group) == list(range(4096))
    assert all(len({rank // 8 for rank in group}) == 1 for group in placed.groups["expert"])
    assert placed.tiers["expert"] == "host"


AXES_WORKER = """
import json
import torch, torch.distributed as dist
from cases.counting import TensorCounter
from gem_comm.api import build_meshes, layout, make_collectives, read_topology
from gem_comm.interface import MeshSpec
dist.init_process_group("gloo")
placed = layout(MeshSpec(expert=2, shard=2, table_shard=4), read_topology("laptop"))
meshes = build_meshes(placed, device="cpu")
rank = dist.get_rank()
x = torch.arange(8.0).view(4, 2) + 100 * rank
with TensorCounter() as counter:
    gathered = make_collectives(meshes, "expert", impl="torch").all_gather(x)
    reduced = make_collectives(meshes, "shard", impl="torch").reduce_scatter(x)
    coded = make_collectives(meshes, "shard", impl="torch", codec="int8").all_gather(x)
    total = make_collectives(meshes, "world", impl="torch").all_reduce(x)
results = {"gathered": gathered, "reduced": reduced, "coded": coded, "total": total}
print(json.dumps({"counts": counter.totals()} | {name: value.tolist() for name, value in results.items()}))
dist.destroy_process_group()
"""


def run_axes(memory: dict[str, Any]) -> dict[str, Any]:
    """Four processes as expert 2 x shard 2; keeps what every rank got and rank 0's counts."""
    memory["ranks"] = run_ranks(AXES_WORKER, 4)
    memory["counts"] = memory["ranks"][0]["counts"]
    return memory


def check_axes(memory: dict[str, Any], result: dict[str, Any]) -> None:
    """By arithmetic: rank r holds base + 100 r; expert groups are (0, 1) and (2, 3), shard groups (0, 2) and (1, 3)."""
    import torch

    base = torch.arange(8.0).view(4, 2)
    held = [base + 100 * rank for rank in range(4)]
    for rank, got in enumerate(result["ranks"]):
        expert, shard = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        of_shard = (held[shard[0]] + held[shard[1]]).chunk(2)[rank // 2]
        assert got["gathered"] == torch.cat([held[r] for r in expert]).tolist()
        assert got["reduced"] == of_shard.tolist()
        assert got["total"] == sum(held).tolist()
        torch.testing.assert_close(torch.tensor(got["coded"]), torch.cat([held[r] for r in shard]), rtol=0, atol=1.3)


CASES = (
    *(
        Case(
            name=f"comm.codec_{codec}_{shape}",
            make=partial(make_rows, codec=codec, shape=shape),
            run=run_codec,
            check=check_codec,
            count=count_tensors,
            formula=wire_bytes,
        )
        for codec, shape in (("int8", "ragged"), ("int8", "uniform"), ("fp8", "ragged"))
    ),
    Case(
        name="comm.layout_4096",
        make=make_layout,
        run=run_layout,
        check=check_layout,
        count=lambda inputs, run: {"python_calls": python_calls(lambda: run(inputs))},
        repeat=40,
    ),
    Case(
        name="comm.axes",
        make=dict,
        run=run_axes,
        check=check_axes,
        count=lambda memory, run: memory["counts"],
        timed=False,
    ),
)
