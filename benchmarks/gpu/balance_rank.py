"""One rank of balance_gain.py: `python balance_rank.py WORK SETTINGS` (JSON). Rank and world come by environment.

Rank 0 writes WORK/balance.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
WARM_UP, TURN = 4, 4
FIRST_LOSSES = 2
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-3}
"""Of the loss of the first step, relative: rows are the same, on other ranks. TF32 keeps 10 bits of a factor."""


class Drawn:
    """As much of gem_data.interface.Loader as training needs: this rank's part of drawn global batches, for ever."""

    def __init__(self, schema: Any, batches: list[Any]) -> None:
        self.schema, self._batches = schema, batches

    def epoch(self) -> Iterator[Any]:
        for number in itertools.count():
            yield dataclasses.replace(self._batches[number % len(self._batches)], step=number)

    def close(self) -> None:
        """Holds nothing."""


class Method:
    """A trainer and the batches that it is given: one way to cut the same global batches."""

    def __init__(self, trainer: Any, loader: Any, synchronize: Any) -> None:
        self._trainer, self._synchronize = trainer, synchronize
        self._batches: Iterator[Any] = loader.epoch()
        self._coming = [next(self._batches)]
        self.close = loader.close
        self.seconds: list[float] = []
        self.samples: list[int] = []
        self.joules: list[float | None] = []
        self.records: list[dict[str, Any]] = []

    def step(self) -> None:
        """One step as a job does it: the next batch is fetched first and made ready on the way."""
        from gem_pipelines.timing import PartClock

        begin = time.perf_counter()
        batches, self._coming = self._coming, [next(self._batches)]
        clock = PartClock(device=self._trainer.runtime.device, synchronize=False)
        record = self._trainer.step(batches, clock=clock, upcoming=self._coming)
        record |= self._trainer.imbalance.record(self._trainer.runtime)
        self._synchronize()
        self.seconds.append(time.perf_counter() - begin)
        self.samples.append(sum(batch.sample_ids.shape[0] for batch in batches))
        self.records.append({name: record[name] for name in ("loss", "imbalance", "events", "flops")})


def make_methods(settings: dict[str, Any], runtime: Any) -> dict[str, Method]:
    import torch
    from gem_pipelines.balance import BalancedLoader
    from gem_pipelines.config import BalanceConfig
    from gem_pipelines.cost import load_model
    from gem_pipelines.model.build import build_model, table_specs
    from gem_pipelines.parallelize import parallelize
    from gem_pipelines.trainer import Trainer
    from parallel_cases import MID, Size, speed_config

    schema = make_schema(settings)
    size = Size(
        **{**dataclasses.asdict(MID), "rows": settings["rows"], "dim": settings["dim"], "layers": settings["layers"]}
    )
    found = {}
    drawn = Drawn(schema, draw_batches(schema, settings, runtime))
    for method in ("none", "global"):
        config = speed_config(size, {}, attention=settings["attention"])
        balance = BalanceConfig(method=method)
        # Labels are drawn, batches small: at the rates of real training losses of 10 and more come and go.
        config = dataclasses.replace(
            config,
            balance=balance,
            optimizer=dataclasses.replace(config.optimizer, lr=1e-5),
            tables=dataclasses.replace(config.tables, lr=1e-4),
        )
        cost = load_model(balance, schema, config.model)
        parallel = parallelize(
            build_model(schema, config.model, seed=0),
            table_specs(schema, config.model),
            config=config.tables,
            parallel=config.parallel,
            seed=0,
            runtime=runtime,
        )
        trainer = Trainer(parallel, schema=schema, config=config, runtime=runtime, total_steps=1000, cost=cost)
        loader: Any = drawn
        if method == "global":
            most = settings["rows"] * runtime.world_size
            loader = BalancedLoader(drawn, cost=cost, runtime=runtime, global_batch_size=most)  # type: ignore[arg-type]
        wait = torch.cuda.synchronize if runtime.device.type == "cuda" else lambda: None
        found[method] = Method(trainer, loader, wait)
    return found


def make_schema(settings: dict[str, Any]) -> Any:
    from gem_data.interface import IdFeature, LabelInfo, Schema, StreamInfo, TableInfo

    item, user = IdFeature(name="item", table="item"), IdFeature(name="user", table="user")
    return Schema(
        name="long-tailed",
        created_by="benchmarks/balance_gain.py",
        tables=(TableInfo(name="item", rows=100_000), TableInfo(name="user", rows=10_000)),
        labels=(LabelInfo(name="click"),),
        scalars=(item, user),
        streams=(StreamInfo(name="views", fields=(item,), action_bits=2, max_length=settings["longest"]),),
    )


def draw_batches(schema: Any, settings: dict[str, Any], runtime: Any) -> list[Any]:
    """This rank's slice of as many global batches as are trained, so that none comes twice while it is timed."""
    import numpy as np
    import torch
    from gem_data.interface import Batch, EventStream
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    rows, world, found = settings["rows"], runtime.world_size, []
    count = rows * world
    mine = slice(rows * runtime.rank, rows * (runtime.rank + 1))
    for number in range(WARM_UP + settings["steps"]):
        rng = np.random.default_rng((17, number))
        drawn = settings["median"] * np.exp(rng.standard_normal(count))
        lengths = np.clip(np.round(drawn), settings["longest"] // 128, settings["longest"]).astype(np.int64)
        labels = rng.integers(0, 2, (count, 1)).astype(np.float32)
        scalars = np.stack([rng.integers(1, 100_000, count), rng.integers(1, 10_000, count)])
        own = np.random.default_rng((18, number, runtime.rank))
        events = int(lengths[mine].sum())
        offsets = np.concatenate([[0], np.cumsum(lengths[mine])])
        times = 1_000_000 + np.arange(events) - np.repeat(offsets[:-1], lengths[mine])
        ids = np.concatenate([scalars[:, mine].reshape(-1), own.integers(1, 100_000, events)])
        sizes = np.concatenate([np.ones(2 * rows, np.int64), lengths[mine]])
        keys = np.arange(count)[mine] + count * number
        found.append(
            Batch(
                sample_ids=torch.from_numpy(keys),
                user_ids=torch.from_numpy(keys.copy()),
                timestamps=torch.full((rows,), 2_000_000),
                labels=torch.from_numpy(labels[mine].copy()),
                weights=torch.ones(rows, 1),
                dense=torch.zeros(rows, 0),
                ids=KeyedJaggedTensor(
                    keys=["item", "user", "views.item"], values=torch.from_numpy(ids), lengths=torch.from_numpy(sizes)
                ),
                streams={
                    "views": EventStream(
                        offsets=torch.from_numpy(offsets),
                        actions=torch.from_numpy(own.integers(0, 4, events)),
                        times=torch.from_numpy(times),
                    )
                },
                row_index=torch.zeros(rows, 3, dtype=torch.int64),
                global_rows=count,
                step=number,
            )
        )
    return found


def measure(methods: dict[str, Method], runtime: Any, *, steps: int) -> dict[str, Any]:
    """Turns of a few steps each, so that what changes on the host changes for both."""
    import torch
    from device import EnergyMeter, energy_per_sample

    runtime.barrier()
    done, why_not = 0, None
    index = runtime.device.index if runtime.device.type == "cuda" else None
    while done < steps:
        for method in methods.values():
            with EnergyMeter(index) as meter:
                for _ in range(min(TURN, steps - done)):
                    method.step()
            runtime.barrier()
            method.joules.append(meter.joules)
            why_not = meter.unavailable
        done += TURN

    rows = {}
    for name, method in methods.items():
        seconds = runtime.max(torch.tensor(method.seconds[WARM_UP:], dtype=torch.float64)).tolist()
        later = [record["imbalance"] for record in method.records[WARM_UP:]]
        rows[name] = {
            "step_s": statistics.median(seconds),
            "fastest_step_s": min(seconds),
            **energy_per_sample(method.joules, method.samples[WARM_UP:], why_not=why_not, gather=runtime.gather_rows),
            "seconds": seconds,
            "load": statistics.mean(one["load"] for one in later),
            "work": statistics.mean(one["seconds"] for one in later),
            "tokens": statistics.mean(one["tokens"] for one in later),
            "events": statistics.mean(record["events"] for record in method.records[WARM_UP:]),
            "flops": statistics.mean(record["flops"] for record in method.records[WARM_UP:]),
            "losses": [record["loss"] for record in method.records],
        }
    return rows


def main(absent: list[str]) -> None:
    import torch
    from bench_ceilings import measure_ceilings
    from device import DeviceRecord, describe_device, describe_working_device
    from gem_pipelines.runtime import start_runtime

    work, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    phases = {"imports": time.perf_counter() - STARTED}

    def mark(name: str) -> None:
        phases[name] = time.perf_counter() - STARTED
        print(f"{name}: {phases[name]:.1f} s", flush=True)

    runtime = start_runtime(device=settings["device"], threads=1, deterministic=False, timeout=timedelta(seconds=60))
    if runtime.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    mark("process group")
    methods = make_methods(settings, runtime)
    mark("models and batches")
    measure_first(methods)
    mark("first steps")
    cuda, none = runtime.device.type == "cuda", DeviceRecord(name="none")
    before = describe_working_device(runtime.device.index) if cuda else none
    rows = measure(methods, runtime, steps=settings["steps"])
    mark("timed steps")
    after = describe_device(runtime.device.index) if cuda else none
    for method in methods.values():
        method.close()  # waits for the exchange that is under way
    apart = [abs(a - b) / abs(a) for a, b in zip(*(row["losses"] for row in rows.values()), strict=True)]
    ceilings = measure_ceilings()[0] if cuda else {}
    if runtime.is_main:
        found = {
            "settings": settings,
            "ceilings": ceilings,
            "device_before": before.to_json(),
            "device": after.to_json(),
            "torch": torch.__version__,
            "stood_in": absent,
            "phases": phases,
            "methods": rows,
            "gain": rows["none"]["step_s"] / rows["global"]["step_s"],
            "first_loss_difference": max(apart[:FIRST_LOSSES]),
            "loss_difference": max(apart),
            "tolerance": TOLERANCE[runtime.device.type],
        }
        (work / "balance.json").write_text(json.dumps(found, indent=1))
    runtime.barrier()
    runtime.close()


def measure_first(methods: dict[str, Method]) -> None:
    """Warm-up: kernels are compiled, memory is allocated."""
    for method in methods.values():
        for _ in range(WARM_UP):
            method.step()


if __name__ == "__main__":
    import torchrec  # noqa: F401  asks whether pyarrow is there: before an empty object answers
    from parallel_worker import stand_in

    main(stand_in())
