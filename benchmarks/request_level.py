"""What sharing a history saves: the same impressions trained as requests, and as plain samples that repeat it.

    OUT=results python benchmarks/request_level.py --device cuda    one GPU, about 40 s
    python benchmarks/request_level.py                              the CPU, small sizes
    python benchmarks/request_level.py --impressions 16 --median 4096

Batches of REQUESTS requests are drawn from a seed, each of IMPRESSIONS impressions, histories exp(normal) x MEDIAN
long, cut to LONGEST. One process trains the same model on them three times, from the same parameters, in turns:

    requests    as they are: histories are looked up and attended to once
    repeated    as they are, but every impression computes the history by itself (StreamConfig.per_request False):
                what the layout alone saves, in the tables and in the batch
    samples     as plain samples with a copy of the history each

Before anything is timed the losses of the first steps are compared; it ends with 1 where they differ. Prints samples a
second, FLOPs and ids of tables a sample; on a CPU also the FLOPs that torch's own counter saw in one forward pass, with
what masks hide. Writes $OUT/request_level.json. Reads no files, so it needs torch, TorchRec and FBGEMM, but no pyarrow.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STARTED = time.perf_counter()
FIRST, TURN = 2, 2
TOLERANCE = {"cpu": 1e-4, "cuda": 3e-3}
"""Of the loss of the first steps, relative: the same sums in another order; TF32 keeps 10 bits of a factor."""
FORMS = ("requests", "repeated", "samples")
CUDA = {"requests": 48, "impressions": 8, "median": 768, "longest": 4096, "dim": 256, "layers": 4, "steps": 16}
CPU = {"requests": 6, "impressions": 8, "median": 192, "longest": 768, "dim": 32, "layers": 2, "steps": 6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    for name, value in CUDA.items():
        parser.add_argument(f"--{name}", type=int, help=f"{value} on CUDA, {CPU[name]} on the CPU")
    parser.add_argument("--attention", choices=("eager", "triton"), help="default: triton on CUDA, eager on the CPU")
    parser.add_argument("--limit-s", type=float, default=55.0, help="no step is begun after so many seconds")
    given = vars(parser.parse_args())
    cuda = given["device"] == "cuda"
    defaults = {**(CUDA if cuda else CPU), "attention": "triton" if cuda else "eager"}
    settings = {name: given[name] or value for name, value in defaults.items()}
    found = compare(settings, device=given["device"], limit_s=given["limit_s"])
    if "OUT" in os.environ:
        from device import DeviceRecord
        from record import write_record

        before, after = DeviceRecord(**found.pop("device_before")), DeviceRecord(**found["device"])
        path = Path(os.environ["OUT"]) / "request_level.json"
        write_record(path, found, ceilings=found.pop("ceilings"), before=before, after=after)
    show(found)
    if found["loss_difference"] > TOLERANCE[given["device"]]:
        print(f"losses differ by {found['loss_difference']:.1e} (relative)", file=sys.stderr)
        return 1
    return 0


def compare(settings: dict[str, Any], *, device: str, limit_s: float) -> dict[str, Any]:
    """Train all forms and measure them."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29613")
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu")]
    sys.path[:0] = [str(path) for path in (*sorted((ROOT / "packages").iterdir()), ROOT / "pipelines")]
    sys.path.insert(0, str(ROOT / "datasets"))
    import torch
    import torchrec  # noqa: F401  asks whether pyarrow is there: before an empty object answers
    from parallel_worker import stand_in

    absent = stand_in()
    from bench_ceilings import measure_ceilings
    from device import DeviceRecord, EnergyMeter, describe_device, describe_working_device
    from gem_pipelines.runtime import start_runtime

    runtime = start_runtime(device=device, threads=1, deterministic=False, timeout=timedelta(seconds=60))
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    schema = make_schema(settings)
    batches = [draw_batch(schema, settings, number) for number in range(FIRST + settings["steps"])]
    forms = {form: Form(form, schema, batches, settings, runtime) for form in FORMS}
    for form in forms.values():
        for _ in range(FIRST):
            form.step(timed=False)
    losses = [form.losses for form in forms.values()]
    apart = [abs(a - b) / abs(b) for own in losses[:-1] for a, b in zip(own, losses[-1], strict=True)]
    done, cuda, none = 0, device == "cuda", DeviceRecord(name="none")
    before = describe_working_device(0) if cuda else none
    while done < settings["steps"] and time.perf_counter() - STARTED < limit_s:
        for form in forms.values():
            with EnergyMeter(0 if cuda else None) as meter:
                for _ in range(min(TURN, settings["steps"] - done)):
                    form.step(timed=True)
            form.joules.append(meter.joules)
            form.why_no_energy = meter.unavailable
        done += TURN
    after = describe_device(0) if cuda else none
    counted = {form.name: form.count_forward() for form in forms.values()} if device == "cpu" else {}
    runtime.close()
    return {
        "settings": settings,
        "device_before": before.to_json(),
        "device": after.to_json(),
        "ceilings": measure_ceilings()[0] if cuda else {},
        "torch": torch.__version__,
        "stood_in": absent,
        "seconds": time.perf_counter() - STARTED,
        "loss_difference": max(apart),
        "forms": {name: form.figures() | counted.get(name, {}) for name, form in forms.items()},
    }


class Form:
    """One way to hold the same impressions, and a trainer of its own."""

    def __init__(self, name: str, schema: Any, batches: Sequence[Any], settings: dict[str, Any], runtime: Any) -> None:
        from gem_data.requests import expand_batch, expanded_schema
        from gem_pipelines.model.build import build_model, table_specs
        from gem_pipelines.parallelize import parallelize
        from gem_pipelines.trainer import Trainer
        from parallel_cases import MID, Size, speed_config

        plain = name == "samples"
        self.name, self.runtime = name, runtime
        self.batches = [expand_batch(schema, batch) for batch in batches] if plain else list(batches)
        schema = expanded_schema(schema) if plain else schema
        size = Size(**{**dataclasses.asdict(MID), "dim": settings["dim"], "layers": settings["layers"]})
        config = speed_config(size, {}, attention=settings["attention"])
        stream = dataclasses.replace(config.model.stream, per_request=name != "repeated")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, stream=stream))
        parallel = parallelize(
            build_model(schema, config.model, seed=0),
            table_specs(schema, config.model),
            config=config.tables,
            parallel=config.parallel,
            seed=0,
            runtime=runtime,
        )
        self.trainer = Trainer(parallel, schema=schema, config=config, runtime=runtime, total_steps=1000)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.samples: list[int] = []
        self.joules: list[float | None] = []
        self.why_no_energy: str | None = None
        self.cpu_seconds: list[float] = []
        self.flops: list[int] = []
        self.peak_bytes = 0
        self._next = 0

    def step(self, *, timed: bool) -> None:
        """One step of training on the next batch."""
        import torch
        from gem_pipelines.timing import PartClock

        cuda = self.runtime.device.type == "cuda"
        batch = dataclasses.replace(self.batches[self._next % len(self.batches)], step=self._next)
        self._next += 1
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin, work = time.perf_counter(), time.thread_time()
        record = self.trainer.step([batch], clock=PartClock(device=self.runtime.device, synchronize=False))
        if cuda:
            torch.cuda.synchronize()
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
        if not timed:
            self.losses.append(record["loss"])
            return
        self.seconds.append(time.perf_counter() - begin)
        self.samples.append(batch.sample_ids.shape[0])
        self.cpu_seconds.append(time.thread_time() - work)
        self.flops.append(record["flops"] / batch.sample_ids.shape[0])

    def count_forward(self) -> dict[str, Any]:
        """FLOPs a sample of one forward pass as torch's counter sees them."""
        import torch
        from gem_pipelines.features import to_model_input
        from torch.utils.flop_counter import FlopCounterMode

        batch, parallel = self.batches[0], self.trainer.parallel
        with torch.no_grad():
            inputs = to_model_input(batch, parallel.tables(batch.ids), schema=self.trainer.schema)
            with FlopCounterMode(display=False) as counter:
                parallel.module(inputs)
        return {"torch_forward_flops_a_sample": counter.get_total_flops() / batch.sample_ids.shape[0]}

    def figures(self) -> dict[str, Any]:
        """Medians over the timed steps."""
        from device import energy_per_sample
        from gem_pipelines.imbalance import batch_bytes

        samples = self.batches[0].sample_ids.shape[0]
        seconds = statistics.median(self.seconds)
        return {
            "steps": len(self.seconds),
            "step_s": seconds,
            "cpu_s": statistics.median(self.cpu_seconds),
            "samples_per_s": samples / seconds,
            **energy_per_sample(self.joules, self.samples, why_not=self.why_no_energy, gather=lambda rows: rows),
            "flops_a_sample": statistics.mean(self.flops),
            "ids_a_sample": statistics.mean(b.ids.values().numel() / samples for b in self.batches),
            "batch_bytes_a_sample": statistics.mean(batch_bytes(b) / samples for b in self.batches),
            "peak_bytes": self.peak_bytes,
            "losses": self.losses,
        }


def make_schema(settings: dict[str, Any]) -> Any:
    from gem_data.interface import IdFeature, LabelInfo, Schema, StreamInfo, TableInfo

    item, user = IdFeature(name="item", table="item"), IdFeature(name="user", table="user")
    return Schema(
        name="requests",
        created_by="benchmarks/request_level.py",
        tables=(TableInfo(name="item", rows=100_000), TableInfo(name="user", rows=10_000)),
        labels=(LabelInfo(name="click"),),
        scalars=(item, user),
        streams=(StreamInfo(name="views", fields=(item,), action_bits=2, max_length=settings["longest"]),),
        impression=("id.item",),
    )


def draw_batch(schema: Any, settings: dict[str, Any], number: int) -> Any:
    import numpy as np
    import torch
    from gem_data.interface import Batch, EventStream
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    rng = np.random.default_rng((19, number))
    rows, each = settings["requests"], settings["impressions"]
    count = rows * each
    drawn = settings["median"] * np.exp(rng.standard_normal(rows))
    lengths = np.clip(np.round(drawn), settings["longest"] // 128, settings["longest"]).astype(np.int64)
    offsets, events = np.concatenate([[0], np.cumsum(lengths)]), int(lengths.sum())
    first = np.arange(0, count, each)
    once, history = np.zeros(count, np.int64), np.zeros(count, np.int64)
    once[first], history[first] = 1, lengths
    values = [rng.integers(1, 100_000, count), rng.integers(1, 10_000, rows), rng.integers(1, 100_000, events)]
    keys = np.arange(count) + count * number
    return Batch(
        sample_ids=torch.from_numpy(keys),
        user_ids=torch.from_numpy(keys // each),
        timestamps=torch.full((count,), 2_000_000),
        labels=torch.from_numpy(rng.integers(0, 2, (count, 1)).astype(np.float32)),
        weights=torch.ones(count, 1),
        dense=torch.zeros(count, 0),
        ids=KeyedJaggedTensor(
            keys=["item", "user", "views.item"],
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate([np.ones(count, np.int64), once, history])),
        ),
        streams={
            "views": EventStream(
                offsets=torch.from_numpy(offsets),
                actions=torch.from_numpy(rng.integers(0, 4, events)),
                times=torch.from_numpy(1_000_000 + np.arange(events) - np.repeat(offsets[:-1], lengths)),
            )
        },
        row_index=torch.zeros(count, 3, dtype=torch.int64),
        global_rows=rows,
        step=number,
        requests=torch.arange(0, count + 1, each),
    )


def show(found: dict[str, Any]) -> None:
    forms = found["forms"]
    cpu = found["device"]["name"] == "none"
    name = "CPU" if cpu else found["device"]["name"]
    print(f"{name}, torch {found['torch']}, {found['seconds']:.0f} s: {found['settings']}")
    print("form        samples/s   ms a step   MFLOPs/sample   ids/sample   batch bytes/sample   peak GB")
    for name, row in forms.items():
        print(
            f"{name:9s} {row['samples_per_s']:11,.0f} {row['step_s'] * 1e3:11.1f} {row['flops_a_sample'] / 1e6:15.1f} "
            f"{row['ids_a_sample']:12.1f} {row['batch_bytes_a_sample']:20,.0f} {row['peak_bytes'] / 1e9:9.2f}"
        )
    for name in FORMS[:2]:
        row, plain = forms[name], forms["samples"]
        line = f"{name} against samples: {plain['step_s'] / row['step_s']:.2f}x faster"
        line += f" ({plain['cpu_s'] / row['cpu_s']:.2f}x in processor seconds)" if cpu else ""
        line += f", {plain['flops_a_sample'] / row['flops_a_sample']:.2f}x fewer FLOPs"
        line += f", {plain['ids_a_sample'] / row['ids_a_sample']:.2f}x fewer ids of tables"
        if "torch_forward_flops_a_sample" in row:
            ratio = plain["torch_forward_flops_a_sample"] / row["torch_forward_flops_a_sample"]
            line += f", {ratio:.2f}x fewer by torch's counter (forward)"
        print(line)
    print(f"losses of the first steps differ by at most {found['loss_difference']:.1e} (relative)")


if __name__ == "__main__":
    sys.exit(main())
