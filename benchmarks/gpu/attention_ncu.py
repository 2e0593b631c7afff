"""What holds each kernel back, by the hardware's counters: run through attention_ncu.sh.

    python attention_ncu.py run --out ORDER      under ncu: every benchmark shape once forward, once backward
    python attention_ncu.py table RAW ORDER OUT  ncu's raw page, as a table and as JSON

`run` compiles and warms each call outside of the profiled range and writes which calls it made, in order; `table` joins
that order with ncu's rows: a row of a forward kernel opens the next call's forward, all up to the next one are its
backward. Counter names are taken from what ncu delivers, since they differ between its versions.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WITHOUT = {"energy": "a profiler runs each kernel many times", "ceilings": "a profiler was attached"}


def run(out: str, names: list[str], impls: list[str]) -> None:
    import torch
    from attention_compare import inputs, ours
    from attention_shapes import shapes
    from device import describe_working_device
    from gem_attention.interface import CannotRunError
    from record import write_record

    before = describe_working_device(0)
    order = []
    for name in names:
        shape = shapes()[name]
        torch.manual_seed(0)
        leaves = inputs(shape)
        do = torch.randn_like(leaves[0])
        for impl in impls:
            call = ours(shape, impl)
            try:
                torch.autograd.grad(call(*leaves), leaves, do)
            except CannotRunError as error:
                print(f"{name} {impl}: {error}", flush=True)
                continue
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.autograd.grad(call(*leaves), leaves, do)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            order.append({"shape": name, "impl": impl})
            write_record(Path(out), {"calls": order}, ceilings={}, before=before, without=WITHOUT)
        del leaves, do
        torch.cuda.empty_cache()


def number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def largest(row: dict[str, str], pattern: str) -> float | None:
    """The greatest value among the columns whose whole name fits the pattern; None where ncu delivered none."""
    found = [number(value) for name, value in row.items() if name and re.fullmatch(pattern, name)]
    return max((x for x in found if x is not None), default=None)


def stalls(row: dict[str, str]) -> list[tuple[str, float]]:
    """The three greatest reasons why warps waited, in warps waiting per issued instruction."""
    pattern = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
    found = [
        (match.group(1), number(value))
        for name, value in row.items()
        if name and (match := pattern.fullmatch(name)) and "not_issued" not in name
    ]
    kept = [(reason, x) for reason, x in found if x is not None and reason != "selected"]
    return sorted(kept, key=lambda pair: -pair[1])[:3]


def facts(row: dict[str, str]) -> dict[str, object]:
    share = r"\.avg\.pct_of_peak_sustained_(active|elapsed)"
    local = [largest(row, rf"l1tex__t_bytes_pipe_lsu_mem_local_op_{op}\.sum") for op in ("ld", "st")]
    time_ns = largest(row, r"gpu__time_duration\.sum")
    return {
        "kernel": row["Kernel Name"].split("(")[0],
        "ms": None if time_ns is None else time_ns / 1e6,
        "tensor_pipe_pct": largest(row, rf"(sm|smsp)__(inst_executed_pipe|pipe)_tensor\w*{share}"),
        "registers": largest(row, r"launch__registers_per_thread"),
        "local_bytes": None if None in local else sum(x for x in local if x is not None),
        "dram_pct": largest(row, r"(gpu__dram_throughput|dram__throughput)" + share),
        "dram_bytes_per_s": largest(row, r"dram__bytes\.sum\.per_second"),
        "l2_pct": largest(row, r"lts__(t_sectors|throughput)" + share),
        "occupancy_pct": largest(row, r"sm__warps_active" + share),
        "issue_pct": largest(row, r"sm__inst_(issued|executed)" + share),
        "stalls": stalls(row),
    }


def table(raw: str, order: str, out: str) -> None:
    with open(raw) as file:
        lines = [line for line in file if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row.get("ID")]  # the row of units has no ID
    with open(order) as file:
        about = json.load(file)
    calls = about.pop("calls")
    found, call = [], -1
    for row in rows:
        if "forward_kernel" in row["Kernel Name"]:
            call += 1
        if not 0 <= call < len(calls):
            sys.exit(f"{len(rows)} profiled kernels do not fit {len(calls)} calls")
        found.append(calls[call] | facts(row))
    with open(out, "w") as file:
        json.dump({**about, "kernels": found}, file, indent=1)
    print("shape  impl   kernel               ms    tensor%  reg  local MB  DRAM%  L2%   occ%  issue%  stalls")

    def shown(x: object, form: str) -> str:
        return "-" if x is None else format(x, form)

    for f in found:
        local = None if f["local_bytes"] is None else f["local_bytes"] / 1e6
        print(
            f"{f['shape']:6s} {f['impl']:6s} {f['kernel'][:19]:19s} {shown(f['ms'], '6.3f')} "
            f"{shown(f['tensor_pipe_pct'], '7.1f')} {shown(f['registers'], '5.0f')} {shown(local, '8.1f')} "
            f"{shown(f['dram_pct'], '6.1f')} {shown(f['l2_pct'], '5.1f')} {shown(f['occupancy_pct'], '6.1f')} "
            f"{shown(f['issue_pct'], '6.1f')}   {', '.join(f'{reason} {x:.1f}' for reason, x in f['stalls'])}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", required=True)
    runs.add_argument(
        "--shapes", nargs="*", default=["B1", "B1f", "B1s", "B1w", "B1r", "B2full", "B2jag", "B3a", "B3b"]
    )
    runs.add_argument("--impls", nargs="*", default=["triton", "gluon"])
    tables = commands.add_parser("table")
    for name in ("raw", "order", "out"):
        tables.add_argument(name)
    args = parser.parse_args()
    if args.command == "run":
        run(args.out, args.shapes, args.impls)
    else:
        table(args.raw, args.order, args.out)


if __name__ == "__main__":
    main()
