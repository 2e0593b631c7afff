"""The tables' conformance suite on GPUs: every sharding, host memory behind a cache, one process and several.

    OUT=results python benchmarks/gpu/tables.py                      worlds 1 and, with two GPUs, 2
    python benchmarks/gpu/tables.py --device cpu --worlds 1 2        the same over gloo: a dry run

Needs torch, TorchRec, FBGEMM and numpy; no pytest, no pyarrow, no network. In a world of one every check of
`gem_embeddings.testing` runs on plain and on cached tables; in every world `check_ranks` (unequal parts of a batch
train as one process does) and `check_start_values` run once per kind of sharding. Prints a line a check: "ok" or the
first error, whole; writes $OUT/tables.json. Ends with 1 when a check failed. About a minute a world.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from device import DeviceRecord, describe_working_device
from record import write_record

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = {"energy": "results are compared, nothing is timed", "ceilings": "results are compared, nothing is timed"}
TIME_LIMIT_S = 240


def cases(world: int, device: str) -> list[dict[str, Any]]:
    """Every case: {"check", "sharding": a kind for all tables or None, "cache": share or None}."""
    from gem_embeddings.api import SHARDINGS
    from gem_embeddings.testing import CHECKS

    shares = (None, 0.3) if device == "cuda" else (None,)
    found: list[dict[str, Any]] = []
    if world == 1:
        found += [{"check": check.__name__, "sharding": None, "cache": share} for share in shares for check in CHECKS]
    for sharding in SHARDINGS:
        found += [
            {"check": "check_start_values", "sharding": sharding, "cache": None},
            {"check": "check_ranks", "sharding": sharding, "cache": None},
        ]
    found += [{"check": "managed_ids", "sharding": None, "cache": share} for share in shares]
    return [*found, *({"check": "check_ranks", "sharding": None, "cache": share} for share in shares if share)]


def run_case(case: dict[str, Any], device: str, rank: int, world: int) -> None:
    from gem_embeddings import testing
    from gem_embeddings.api import build_tables

    sharding = {} if case["sharding"] is None else testing.shardable(case["sharding"])

    def factory(specs, optimizer, seed, **options):  # type: ignore[no-untyped-def]
        return build_tables(
            specs,
            optimizer=optimizer,
            seed=seed,
            device=device,
            cache_share=case["cache"],
            sharding=sharding,
            **options,
        )

    quirks = testing.Quirks(device=device, column_parts=testing.parts_of(sharding))
    if case["check"] == "check_ranks":
        testing.check_ranks(factory, quirks, rank, world)
    elif case["check"] == "managed_ids":
        managed_ids(factory, device, rank, world)
    else:
        getattr(testing, case["check"])(factory, quirks)


def managed_ids(factory: Any, device: str, rank: int, world: int) -> None:
    """Ids that earn their rows: the map of one process to the bit, its tables to rounding."""
    import torch
    from gem_embeddings import testing
    from gem_embeddings.interface import ManagedIds
    from gem_embeddings.reference import ReferenceTables

    managed = {"item": ManagedIds(policy="distance_lfu", interval=2), "tag": ManagedIds(policy="lru", interval=3)}
    specs = [dataclasses.replace(spec, rows=5) if spec.name in managed else spec for spec in testing.SPECS]
    tables = factory(specs, testing.OPTIMIZER, testing.SEED, managed=managed)
    one = ReferenceTables(specs, optimizer=testing.OPTIMIZER, seed=testing.SEED, alone=True, managed=managed)
    rows, prepared = 4 * world + 1, None
    bounds = [4 * r for r in range(world)] + [rows]

    def part(step: int) -> Any:
        own = testing.part_of(testing.make_ids(rows, seed=step), bounds[rank], bounds[rank + 1])
        return own.to(torch.device(device))

    for step in range(8):
        prepared = testing.train_step(
            tables, part(step), first_row=bounds[rank], scale=world / rows, prepared=prepared, ahead=part(step + 1)
        )
        testing.train_step(one, testing.make_ids(rows, seed=step), scale=1 / rows)
    found, expected = tables.id_state(), one.id_state()
    for name, parts in expected.items():
        for key, value in parts.items():
            assert torch.equal(found[name][key], value), (name, key, found[name][key], value)
    state = tables.table_state()
    for name, parts in one.table_state().items():
        for key, value in parts.items():
            torch.testing.assert_close(state[name][key], value, rtol=1e-4, atol=1e-5)
    assert tables.policy_counts()["item"]["evicted"] > 0


def work(kind: str, out: Path) -> None:
    """One rank: all cases in order; a rank that fails one says so and goes on, unless ranks would then be apart."""
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    results = []
    for case in cases(world, kind):
        start, error, place = time.perf_counter(), "", ""
        try:
            run_case(case, device, rank, world)
            if kind == "cuda":
                torch.cuda.synchronize()
        except Exception as problem:
            frames = traceback.extract_tb(problem.__traceback__)
            place = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-6:]))
            error = f"{type(problem).__name__}: {problem}"
        results.append({**case, "error": error, "at": place, "seconds": round(time.perf_counter() - start, 2)})
        (out / f"world-{world}-rank-{rank}.json").write_text(json.dumps(results))
        if error and "CUDA error" in error:
            break  # nothing after it would work
    dist.destroy_process_group()


def launch(kind: str, world: int, out: Path) -> list[dict[str, Any]]:
    """What rank 0 found, or the first rank that found an error; whatever was written when a rank hung."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([*map(str, ROOT.glob("packages/*/")), os.environ.get("PYTHONPATH", "")])
    ranks = []
    for rank in range(world):
        settings = os.environ | {
            "PYTHONPATH": paths,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
        }
        command = [sys.executable, __file__, "--work", str(out), "--device", kind]
        with (out / f"world-{world}-rank-{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(command, env=settings, stdout=log, stderr=subprocess.STDOUT))
    end, said = time.monotonic() + TIME_LIMIT_S, ""
    for process in ranks:
        try:
            process.wait(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            said = f"not done within {TIME_LIMIT_S} s"
    for process in ranks:
        process.kill()
    found: list[dict[str, Any]] = []
    for rank in range(world):
        file = out / f"world-{world}-rank-{rank}.json"
        own = json.loads(file.read_text()) if file.exists() else []
        found = own if not found else [b if b["error"] else a for a, b in zip(found, own, strict=False)]
    if said or any(process.returncode for process in ranks):
        tail = (out / f"world-{world}-rank-0.log").read_text()[-1500:]
        found.append({"check": "the process", "sharding": None, "cache": None, "error": said or tail, "at": ""})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--worlds", type=int, nargs="+", choices=(1, 2, 4))
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.device, given.work)
        return 0
    worlds = given.worlds
    if not worlds:
        import torch

        worlds = [n for n in (1, 2) if given.device == "cpu" or n <= torch.cuda.device_count()]
    record: dict[str, Any] = {"device": given.device, "worlds": {}}
    before = describe_working_device(0) if given.device == "cuda" else DeviceRecord(name="none")
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            record["worlds"][world] = launch(given.device, world, Path(folder))
    path = Path(os.environ.get("OUT", ".")) / "tables.json"
    write_record(
        path, record, ceilings={}, before=before, after=None if given.device == "cuda" else before, without=WITHOUT
    )
    failed = 0
    for world, found in record["worlds"].items():
        for row in found:
            failed += bool(row["error"])
            name = f"{world}  {row['check']:20s} {row['sharding'] or '':15s} {row['cache'] or '':4}"
            print(f"{name} {row['error'][:600] or 'ok'}" + (f"\n     at {row['at']}" if row["at"] else ""), flush=True)
        print(f"world {world}: {sum(not row['error'] for row in found)} of {len(found)} ok", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
