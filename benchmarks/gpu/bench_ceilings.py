"""The two ceilings of a GPU: a large bf16 matrix product and a device copy, with the device's state and energy.

    python benchmarks/gpu/bench_ceilings.py --out ceilings.json

Every benchmark measures them again in its own process (`measure_ceilings`), since one card gives different ones minutes
apart. Both are verified first: the product against float64 on a slice, the copy by equality.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from device import describe_working_device, joules_per_call
from record import Measurement, write_measurements
from timing import device_milliseconds

SIZE = 8192
COPY_BYTES = 2 << 30
REPEAT = 30


def measure_ceilings() -> tuple[dict[str, float], list[Measurement]]:
    """({"bf16_matmul_flop_per_s": ..., "copy_bytes_per_s": ...}, the measurements behind them)."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    torch.matmul(a, b, out=out)
    exact = a[:16].double() @ b.double()
    error = (out[:16].double() - exact).abs().max().item()
    if error > 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max().item():
        raise ValueError(f"the matrix product is wrong by {error}")
    product = device_milliseconds(lambda: torch.matmul(a, b, out=out), repeat=REPEAT)
    energy = {"bf16_matmul_8192": joules_per_call(lambda: torch.matmul(a, b, out=out), wait=torch.cuda.synchronize)}
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    if not torch.equal(source, target):
        raise ValueError("the copy differs from its source")
    copy = device_milliseconds(lambda: target.copy_(source), repeat=REPEAT)
    energy["copy_2gib"] = joules_per_call(lambda: target.copy_(source), wait=torch.cuda.synchronize)
    flops, moved = 2 * SIZE**3, 2 * COPY_BYTES
    found = [
        Measurement(case="ceilings.bf16_matmul_8192", unit="ms", samples=tuple(product), facts={"flops": flops}),
        Measurement(case="ceilings.copy_2gib", unit="ms", samples=tuple(copy), facts={"bytes": moved}),
    ]
    for one in list(found):
        joules, why_not = energy[one.case.removeprefix("ceilings.")]
        if joules is None:
            one.facts["energy_unavailable"] = why_not
        else:
            found.append(Measurement(case=one.case, unit="J", samples=(joules,)))
    ceilings = {
        "bf16_matmul_flop_per_s": flops / statistics.median(product) * 1e3,
        "copy_bytes_per_s": moved / statistics.median(copy) * 1e3,
    }
    return ceilings, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    before = describe_working_device(0)
    ceilings, found = measure_ceilings()
    write_measurements(arguments.out, found, ceilings=ceilings, before=before)
    print({name: f"{value:.4g}" for name, value in ceilings.items()})


if __name__ == "__main__":
    main()
