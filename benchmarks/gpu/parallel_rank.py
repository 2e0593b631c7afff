"""One rank of parallel.py: `python parallel_worker.py WORK SETTINGS`. Rank and world come
by environment, the packages by PYTHONPATH; parallel.py sees to both.

Rank 0 writes WORK/world-<n>.json. At world size 1 the states that others are compared with go to WORK/<name>.npz.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import parallel_cases as cases
import torch
from device import DeviceRecord, EnergyMeter, describe_device, describe_working_device, energy_per_sample
from gem_comm.api import Traffic, make_collectives, observe_traffic, probe_topology
from gem_comm.fsdp import FsdpAllGather
from gem_comm.interface import Device, Meshes, Tier, Topology
from gem_embeddings import torchrec_tables
from gem_pipelines.measure import matmul_peak_flops_per_s
from gem_pipelines.model.build import build_model, table_specs
from gem_pipelines.parallel_graphs import check_graphs
from gem_pipelines.parallel_mesh import mesh_spec
from gem_pipelines.parallelize import parallelize
from gem_pipelines.planner.estimate import Assumptions, estimate
from gem_pipelines.planner.moves import bytes_by_axis
from gem_pipelines.planner.shapes import shaped_workload
from gem_pipelines.runtime import Runtime, start_runtime
from gem_pipelines.timing import PartClock, only_new_garbage
from gem_pipelines.trainer import Trainer
from parallel_profile import profiled, waits_by_line, watched
from torch.distributed.fsdp import FSDPModule, fully_shard

STARTED = time.perf_counter()


def make_trainer(schema: Any, config: Any, runtime: Runtime, *, rows: int = 512) -> Trainer:
    """rows: of a batch of this rank."""
    parallel = parallelize(
        build_model(schema, config.model, seed=0),
        table_specs(schema, config.model),
        config=config.tables,
        parallel=config.parallel,
        seed=0,
        runtime=runtime,
        compiled=config.model.compile,
        graphs=config.model.graphs,
        rows_per_rank=rows,
    )
    return Trainer(parallel, schema=schema, config=config, runtime=runtime, total_steps=config.train.steps or 1)


def train(trainer: Trainer, batches: list[list[Any]], steps: int, *, after: Any = None) -> list[dict[str, Any]]:
    """`steps` steps on the batches in turn, the next one announced as the job does; `after()` follows each."""
    records, overlap = [], trainer.config.parallel.overlap
    for number in range(steps):
        coming = batches[(number + 1) % len(batches)] if overlap and number + 1 < steps else None
        clock = PartClock(device=trainer.runtime.device, synchronize=False)
        records.append(trainer.step(batches[number % len(batches)], clock=clock, upcoming=coming))
        if after is not None:
            after()
    return records


# ------------------------------------------------------------------------------------------------ parity


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Everything that training changed, whole, on the CPU. A collective."""
    found = {f"dense.{k}": v for k, v in trainer.parallel.dense_state().items()}
    found |= {f"optimizer.{k}": v for k, v in trainer.optimizer.state_tensors().items()}
    for table, entry in trainer.parallel.tables.table_state().items():
        found |= {f"tables.{table}.{kind}": value for kind, value in entry.items()}
    return {key: value.detach().cpu().clone() for key, value in found.items()}


def parity(work: Path, runtime: Runtime) -> list[dict[str, Any]]:
    """Every factorization of this world size, 20 steps, against one process: the largest difference."""
    schema = cases.parity_schema()
    batches = [[batch] for batch in cases.parity_batches(runtime.rank, runtime.world_size)]
    rows = []
    for name, (section, model) in cases.PARITY[runtime.world_size].items():
        start = time.perf_counter()
        trainer = make_trainer(schema, cases.parity_config(section, model), runtime)
        losses = [record["loss"] for record in train(trainer, batches, len(batches))]
        state = whole_state(trainer)
        if runtime.world_size == 1:
            numpy.savez(work / f"{model}.npz", losses=losses, **{key: value.numpy() for key, value in state.items()})
            continue
        if runtime.is_main:
            rows.append({"name": name, **compare(work / f"{model}.npz", state, losses)})
            rows[-1]["seconds"] = time.perf_counter() - start
    return rows


def compare(oracle: Path, state: dict[str, torch.Tensor], losses: list[float]) -> dict[str, Any]:
    """worst: largest absolute difference of parameters and moments; loss: largest relative difference of losses."""
    with numpy.load(oracle, allow_pickle=False) as found:
        whole = {key: torch.from_numpy(found[key]) for key in found.files}
    expected = whole.pop("losses").tolist()
    if whole.keys() != state.keys():
        raise ValueError(f"{oracle.stem}: the states have different names: {whole.keys() ^ state.keys()}")
    worst = {key: float((state[key].double() - value.double()).abs().max()) for key, value in whole.items()}
    where = max(worst, key=worst.__getitem__)
    loss = max(abs(b - a) / abs(a) for a, b in zip(expected, losses, strict=True))
    return {
        "worst": worst[where],
        "where": where,
        "loss": loss,
        "last_loss": losses[-1],
        "within_1e-5": worst[where] <= 1e-5 and loss <= 1e-5,
    }


# ------------------------------------------------------------------------------------------------ speed


def speed(
    work: Path, runtime: Runtime, size: cases.Size, attention: str, *, variants: list[str], seconds: float
) -> dict[str, Any]:
    """The mid-size recipe under the factorizations of this world size; a rank's batch is the same at every size."""
    schema, world = cases.speed_schema(size), runtime.world_size
    drawn = [
        cases.draw_batch(schema, size.rows, mean=size.events, seed=1000 * runtime.rank + number) for number in range(4)
    ]
    batches = [[dataclasses.replace(batch, global_rows=world * size.rows)] for batch in drawn]
    if runtime.device.type == "cuda":
        draw_tables_on(runtime.device)
    device = measured_device(runtime)
    topology = measured_topology(runtime, device)
    probed = {"collective_host_s": collective_call_s(runtime), "unit_host_s": unit_host_s(runtime)}

    def measured(label: dict[str, Any], section: dict[str, Any], variant: str) -> list[dict[str, Any]]:
        config = cases.speed_config(size, section, attention=attention, variant=variant)
        check_graphs(config, runtime.device, schema)
        trainer = make_trainer(schema, config, runtime, rows=size.rows)
        row = {**label, **timed(trainer, batches, size.steps)}
        if world == 1:
            calibrate(work, row, plan(work, schema, config, topology, size, variant=variant), device)
        found = [row | plan(work, schema, config, topology, size, variant=variant, probed=probed)]
        whole = section.get("shard") == world > 1 and "table_replica" not in section
        if whole and variant == "overlap" and runtime.device.type == "cuda":
            label = {**label, "name": f"{label['name']}.peer_copy"}
            found.append({**label, **with_peer_copies(trainer, batches, size)})
        return found

    rows: list[dict[str, Any]] = []
    for name, variant in cases.speed_runs(world, variants):
        section, label = cases.SPEED[world][name], {"name": name, "variant": variant}
        if slowest(time.perf_counter() - STARTED, runtime) > seconds:
            rows.append({**label, "reason": "left out: no time"})
            continue
        try:
            rows += measured(label, section, variant)
        except Exception as problem:  # in the table, and the run fails at its end: the other rows are worth having
            rows.append({**label, "reason": f"{type(problem).__name__}: {problem}"[:200], "failed": True})
            traceback.print_exc()
        gc.collect()
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()
    return {"rows": rows, "topology": to_json(topology), **probed}


def draw_tables_on(device: torch.device) -> None:
    """From here on tables start with numbers that the device draws: a step takes as long, the start seconds less."""

    def draw(spec: Any, *, seed: int, start: int, stop: int) -> torch.Tensor:
        return torch.randn(stop - start, spec.dim, device=device) * spec.init_std

    torchrec_tables.initial_rows = draw


def with_peer_copies(trainer: Trainer, batches: list[Any], size: cases.Size) -> dict[str, Any]:
    """The same trainer with FSDP2's all-gathers by the copy engines; or the reason why they cannot run."""
    meshes = trainer.parallel.meshes
    assert isinstance(meshes, Meshes)
    try:
        comm = make_collectives(meshes, "shard_expert", impl="peer_copy", device=trainer.runtime.device)
    except ValueError as problem:
        return {"reason": str(problem)}
    for module in trainer.parallel.module.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(FsdpAllGather(comm))
    return timed(trainer, batches, size.steps)


def timed(trainer: Trainer, batches: list[Any], steps: int) -> dict[str, Any]:
    """Median step and mean step of the slowest rank, host seconds by phase, bytes by axis of one step, and what the
    profiler says of three more. Steps follow one another as in a job: nothing waits for the device between them.
    """
    runtime = trainer.runtime
    torch.cuda.reset_peak_memory_stats() if runtime.device.type == "cuda" else None
    train(trainer, batches, 6)
    traffic = counted(trainer, batches[0])
    marks, meter = [begin(runtime)], EnergyMeter(own_device(runtime))
    with meter:
        with only_new_garbage(), watched(trainer) as spent:
            train(trainer, batches, steps, after=lambda: marks.append(time.perf_counter()))
        synchronize(runtime)
        mean = (time.perf_counter() - marks[0]) / steps
    samples = sum(batches[number % len(batches)][0].sample_ids.shape[0] for number in range(steps))
    seconds = [stop - start for start, stop in itertools.pairwise(marks)]
    exposed: dict[str, Any] = {}
    if runtime.device.type == "cuda":
        exposed = {"waits_by_line": waits_by_line(lambda count: train(trainer, batches, 2 * count))}
        exposed |= profiled(lambda count: train(trainer, batches, count))
    host = {phase: total / steps for phase, total in spent.items()}
    return {
        "step_s": slowest(statistics.median(seconds), runtime),
        "mean_step_s": slowest(mean, runtime),
        "fastest_step_s": slowest(min(seconds), runtime),
        **energy_per_sample([meter.joules], [samples], why_not=meter.unavailable, gather=runtime.gather_rows),
        "host_phases_s": host,
        "host_s": statistics.median(seconds) - host.get("wait", 0.0),
        "bytes_by_group": {f"{axis} {kind}": sent for (axis, kind), sent in traffic.sent.items() if sent},
        **exposed,
        "memory_bytes": torch.cuda.max_memory_allocated() if runtime.device.type == "cuda" else None,
    }


def own_device(runtime: Runtime) -> int | None:
    """torch's number of this rank's GPU; None on the CPU."""
    return runtime.device.index if runtime.device.type == "cuda" else None


def unit_host_s(runtime: Runtime, layers: int = 6, steps: int = 20) -> float:
    """Host seconds that FSDP2 adds to forward and backward for each of its units: small layers, cut or not; no launch
    of theirs takes longer than the host needs for the next. 0 for one rank.
    """
    if runtime.world_size == 1:
        return 0.0
    mesh = torch.distributed.init_device_mesh(runtime.device.type, (runtime.world_size,))
    x = torch.randn(64, 64, device=runtime.device)
    spent = []
    for cut in (False, True):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device=runtime.device) for _ in range(layers)))
        if cut:
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        seconds = []
        for _ in range(steps):
            start = begin(runtime)
            model(x).sum().backward()
            seconds.append(time.perf_counter() - start)
            model.zero_grad()
        spent.append(statistics.median(seconds[steps // 4 :]))
    return slowest(max(0.0, spent[1] - spent[0]) / (layers + 1), runtime)


def collective_call_s(runtime: Runtime, calls: int = 50) -> float:
    """Host seconds to issue one small collective where the model computes; 0 for one rank."""
    if runtime.world_size == 1:
        return 0.0
    x = torch.zeros(8, device=runtime.device)
    torch.distributed.all_reduce(x)
    start = begin(runtime)
    for _ in range(calls):
        torch.distributed.all_reduce(x)
    spent = (time.perf_counter() - start) / calls
    synchronize(runtime)
    return slowest(spent, runtime)


def begin(runtime: Runtime) -> float:
    """The time at which all ranks are ready."""
    runtime.barrier()
    synchronize(runtime)
    return time.perf_counter()


def counted(trainer: Trainer, batch: list[Any]) -> Traffic:
    """What rank 0 sends in one step. Axes over the same ranks share a group, which has the name of one of them."""
    meshes, world = trainer.parallel.meshes, torch.distributed.group.WORLD
    assert world is not None
    groups = {"world": world, **(meshes.process_groups if meshes else {})}
    own = getattr(trainer.parallel.tables, "group", world)
    if own not in groups.values():
        groups["tables"] = own
    order = ("shard", "table_shard", "expert", "replicate", "table_replica", "tables")
    preferred = [axis for axis in order if axis in groups]
    traffic = Traffic()
    with observe_traffic(groups, traffic, order=preferred):
        train(trainer, [batch], 1)
    return traffic


def synchronize(runtime: Runtime) -> None:
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()


def slowest(value: float, runtime: Runtime) -> float:
    return float(runtime.gather_rows(torch.tensor([value], dtype=torch.float64)).max())


# ------------------------------------------------------------------------------------------------ prediction


def measured_device(runtime: Runtime) -> Device:
    """Peak of a product and bandwidth of a copy, measured."""
    peak = matmul_peak_flops_per_s(runtime.device)
    count = (1 << 28) if runtime.device.type == "cuda" else (1 << 23)
    source, target = (torch.ones(count, device=runtime.device) for _ in range(2))
    best = math.inf
    for _ in range(6):
        synchronize(runtime)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(runtime)
        best = min(best, time.perf_counter() - start)
    memory = torch.cuda.get_device_properties(runtime.device).total_memory if runtime.device.type == "cuda" else 8e9
    return Device(
        name=look(describe_device, runtime).name,
        flops_per_s=peak,
        memory_bytes=float(memory),
        memory_bytes_per_s=8.0 * count / best,
    )


def measured_topology(runtime: Runtime, device: Device) -> Topology:
    if runtime.world_size == 1:
        alone = Tier(name="alone", group_size=None, bandwidth_bytes_per_s=1.0, latency_s=0.0)
        return Topology(name="one", tiers=(alone,), device=device, source="one rank has no network")
    probed = probe_topology(device=runtime.device)
    return Topology(name="probed", tiers=probed.tiers, device=device, source=probed.source)


def plan(
    work: Path,
    schema: Any,
    config: Any,
    topology: Topology,
    size: cases.Size,
    *,
    variant: str,
    probed: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Predicted step. What the device and the host do on this model is known from the step of one rank."""
    world = torch.distributed.get_world_size()
    spread = [round(2 * size.events * (number + 0.5) / 8) for number in range(8)]
    workload = shaped_workload(
        schema,
        config.model,
        name=config.name,
        batch=size.rows,
        lengths={stream.name: spread for stream in schema.streams},
        stream_means={stream.name: float(size.events) for stream in schema.streams},
        list_means={feature.name: 1.5 for feature in schema.lists},
        source="drawn batches",
    )
    file = work / f"one-{variant}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    found = estimate(
        workload,
        mesh_spec(config.parallel, world),
        topology,
        Assumptions(table_gathers=1, **(probed or {}), **known),
    )
    return {
        "predicted_s": found.step_s,
        "predicted_parts_s": dict(found.seconds),
        "planned_bytes_by_axis": bytes_by_axis(tuple(move for move, _ in found.moved)),
        "flops": size.rows * (workload.forward_flops + workload.backward_flops),
        **known,
    }


def calibrate(work: Path, row: dict[str, Any], planned: dict[str, Any], device: Device) -> None:
    """From the step of one rank: which share of the peak makes the predicted device time the measured one (the whole
    step where no profiler saw the device), and what the host took.
    """
    parts = planned["predicted_parts_s"]
    others = sum(seconds for part, seconds in parts.items() if part not in ("compute", "recompute", "host"))
    busy = row.get("busy_s", row["step_s"])
    share = planned["flops"] / device.flops_per_s / max(busy - others, 1e-9)
    host = row["host_s"] if "busy_s" in row else 0.0
    (work / f"one-{row['variant']}.json").write_text(json.dumps({"utilisation": share, "host_s": host}))


def to_json(topology: Topology) -> dict[str, Any]:
    assert topology.device is not None
    return {
        "tiers": [
            {
                "name": tier.name,
                "bandwidth_bytes_per_s": tier.bandwidth_bytes_per_s,
                "latency_s": tier.latency_s,
            }
            for tier in topology.tiers
        ],
        "flops_per_s": topology.device.flops_per_s,
        "memory_bytes_per_s": topology.device.memory_bytes_per_s,
        "source": topology.source,
    }


def measure(work: Path, runtime: Runtime, given: dict[str, Any]) -> dict[str, Any]:
    # Speed is measured as a job that does not ask for the same bits would run.
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(given["matmul"])
    size, settings = cases.SIZES[given["size"]], {"variants": given["variants"], "seconds": given["seconds"]}
    return speed(work, runtime, size, given["attention"], **settings)


def look(describe: Callable[[int], DeviceRecord], runtime: Runtime) -> DeviceRecord:
    """This rank's GPU."""
    index = own_device(runtime)
    return DeviceRecord(name="none") if index is None else describe(index)


def main(absent: list[str]) -> None:
    work, given = sys.argv[1], json.loads(sys.argv[2])
    runtime = start_runtime(device=given["device"], threads=1, deterministic=True, timeout=timedelta(seconds=120))
    found: dict[str, Any] = {"world_size": runtime.world_size, "parity": [], "speed": {"rows": []}}
    before = look(describe_working_device, runtime)
    if given["only"] != "speed":
        found["parity"] = parity(Path(work), runtime)
    if given["only"] != "parity":
        found["speed"] = measure(Path(work), runtime, given)
    if runtime.is_main:
        found |= {"device_before": before.to_json(), "device": look(describe_device, runtime).to_json()}
        found |= {"torch": torch.__version__, "stood_in": absent}
        (Path(work) / f"world-{runtime.world_size}.json").write_text(json.dumps(found, indent=1))
    runtime.barrier()
    runtime.close()
