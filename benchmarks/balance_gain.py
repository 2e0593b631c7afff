"""Step time of two ranks on long-tailed lengths, without and with the balancer across ranks.

    OUT=results python benchmarks/balance_gain.py                   two GPUs
    python benchmarks/balance_gain.py --device cpu                  two gloo processes, small sizes
    python benchmarks/balance_gain.py --rows 16 --median 4096       another workload

Both ranks draw the same global batches from a seed: histories exp(normal) x MEDIAN long, cut to LONGEST. They train the
same model on them twice, from the same parameters, in turns of a few steps in one pair of processes: as the batches are
cut, and balanced by counted FLOPs, with the exchange of rows that a job has (gem_pipelines.balance, one step ahead, on
a gloo group of its own). Before anything is timed, the losses of the first steps are compared. Timed steps are those
behind the warm-up; a step's time is that of the slower rank.

Reads no files, so it needs torch, TorchRec and FBGEMM, but no pyarrow. Products run in TF32 on CUDA. Prints a table,
writes $OUT/balance_gain.json. Ends with 1 when losses differ or the ranks are not done within --limit-s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

GPU = Path(__file__).with_name("gpu")
WORKER = GPU / "balance_rank.py"
# rows of a rank, median, longest, dim, layers, steps timed of each method
CUDA = {"rows": 32, "median": 2048, "longest": 8192, "dim": 256, "layers": 4, "steps": 24}
CPU = {"rows": 8, "median": 64, "longest": 512, "dim": 32, "layers": 2, "steps": 16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, value in CUDA.items():
        parser.add_argument(f"--{name}", type=int, help=f"{value} on CUDA, {CPU[name]} on the CPU")
    parser.add_argument("--attention", choices=("eager", "triton"), help="default: triton on CUDA, eager on the CPU")
    parser.add_argument("--limit-s", type=float, default=95.0)
    given = vars(parser.parse_args())
    cuda = given["device"] == "cuda"
    defaults = {**(CUDA if cuda else CPU), "attention": "triton" if cuda else "eager"}
    chosen = {name: given[name] or value for name, value in defaults.items()}
    sys.path.insert(0, str(GPU))
    from device import DeviceRecord
    from parallel import launch
    from record import write_record

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            launch(
                2, work, [json.dumps({**chosen, "device": given["device"]})], limit_s=given["limit_s"], worker=WORKER
            )
        except RuntimeError as problem:
            print(problem, file=sys.stderr)
            return 1
        found = json.loads((work / "balance.json").read_text())
    if "OUT" in os.environ:
        before, after = DeviceRecord(**found.pop("device_before")), DeviceRecord(**found["device"])
        path = Path(os.environ["OUT"]) / "balance_gain.json"
        write_record(path, found, ceilings=found.pop("ceilings"), before=before, after=after)
    print(f"{found['device']['name'] if cuda else 'CPU'}: {chosen}")
    print("phases, seconds since the start: " + ", ".join(f"{name} {at:.0f}" for name, at in found["phases"].items()))
    print("balance   ms a step (median, fastest)   load   own work   (max over mean of the ranks, mean over steps)")
    for method, row in found["methods"].items():
        step, fastest = row["step_s"] * 1e3, row["fastest_step_s"] * 1e3
        print(f"{method:8s}  {step:12.2f} {fastest:12.2f}   {row['load']:8.3f}  {row['work']:8.3f}")
    print(f"gain: {found['gain']:.3f}x; losses differ by at most {found['loss_difference']:.1e} (relative)")
    if found["first_loss_difference"] > found["tolerance"]:
        print(f"the first losses differ by {found['first_loss_difference']:.1e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
