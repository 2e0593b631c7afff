"""Ours and the public peers, alternately, in one process: `python attention_compare.py --peers FOLDER --out FILE`.

Per shape: every contender runs once forward and once backward per round, in turn, the device spinning before each, so
that clocks and temperature hit all alike; the median of the rounds counts. The output and the gradients of every
contender are first compared with ours in float32 arithmetic on the same inputs, and a matrix product and a copy are
measured beside the rows. Softmax shapes are set against PyTorch's own attentions, which need no folder. --warm SHAPE
only fills the kernel caches (start several, they compile in parallel).
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention_peers import contenders
from attention_shapes import Shape, shapes
from attention_softmax import softmax_contenders
from attention_timing import copy_tb_s, matmul_tflops, one_ms
from device import describe_working_device, joules_per_call
from gem_attention.api import attention, make_layout
from record import write_record
from torch import Tensor

Call = Callable[..., Tensor]


def ours(shape: Shape, impl: str) -> Call:
    q_offsets = torch.tensor([0, *shape.q_lengths], device="cuda").cumsum(0)
    k_offsets = None if shape.is_self else torch.tensor([0, *shape.k_lengths], device="cuda").cumsum(0)
    targets = torch.tensor(shape.num_targets(), device="cuda") if shape.targets else None
    times = torch.tensor(shape.timestamps(), device="cuda") if shape.bias else None
    layout = make_layout(q_offsets=q_offsets, k_offsets=k_offsets, num_targets=targets, timestamps=times)
    spec = shape.spec()

    def call(q: Tensor, k: Tensor, v: Tensor, position: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        return attention(q, k, v, spec=spec, layout=layout, position_table=position, time_table=time, impl=impl)

    return call


def inputs(shape: Shape) -> tuple[Tensor, ...]:
    """q, k, v and, with a bias, the tables by position and by time, one row for all heads."""
    q, k = sum(shape.q_lengths), sum(shape.k_lengths)
    made = [torch.randn(n, shape.heads, shape.dim, device="cuda", dtype=torch.bfloat16) * 0.5 for n in (q, k, k)]
    if shape.bias is not None and shape.bias.time is not None:
        columns = (2 * shape.bias.max_positions - 1, shape.bias.time.count)
        made += [torch.randn(1, n, device="cuda", dtype=torch.bfloat16) * 0.5 for n in columns]
    return tuple(t.requires_grad_() for t in made)


def steps(call: Call, qkv: tuple[Tensor, ...], do: Tensor) -> tuple[Callable, Callable, list[Tensor]]:
    """(forward, backward, [out, dq, dk, dv, gradients of the tables])."""
    out = call(*qkv)
    grads = torch.autograd.grad(out, qkv, do, retain_graph=True, allow_unused=True)

    def forward() -> None:
        with torch.no_grad():
            call(*qkv)

    def backward() -> None:
        torch.autograd.grad(out, qkv, do, retain_graph=True, allow_unused=True)

    return forward, backward, [out.detach(), *grads]


def difference(got: list[Tensor | None], want: list[Tensor]) -> list[float]:
    return [
        round(float((g.double() - w.double()).norm() / w.double().norm()), 5)
        for g, w in zip(got, want, strict=True)
        if g is not None
    ]


def compare(
    shape: Shape,
    peers: str | None,
    impls: list[str],
    rounds: int,
    only: list[str] | None = None,
    *,
    energy_s: float = 0.0,
) -> list[dict]:
    """A row each: why it did not run, or its difference from the first and its times; rounds 0: nothing is timed.

    energy_s: for so long forward and backward of each of ours are repeated, after the rounds, to read their energy.
    """
    torch.manual_seed(0)
    qkv = inputs(shape)
    do = torch.randn_like(qkv[0])
    makers: dict[str, Callable[[], Call]] = {f"ours, {impl}": lambda impl=impl: ours(shape, impl) for impl in impls}
    others = softmax_contenders(shape) if shape.softmax else {}
    if peers and not shape.softmax:
        others = {name: lambda make=make: make(peers) for name, make in contenders(shape).items()}
    makers |= {name: make for name, make in others.items() if not only or name in only}
    rows, timed, want = [], {}, None
    for name, make in makers.items():
        try:
            forward, backward, got = steps(make(), qkv, do)
        except Exception as error:
            traceback.print_exc(limit=-2)
            rows.append({"shape": shape.name, "name": name, "error": f"{type(error).__name__}: {str(error)[:300]}"})
            continue
        if rounds == 0:
            del got
            continue
        want = want or got
        rows.append({"shape": shape.name, "name": name, "difference_from_first": difference(got, want)})
        timed[name] = (forward, backward, [], [])
        del got
    if rounds == 0:
        return rows
    rate = matmul_tflops()
    for i in range(rounds + 5):
        for forward, backward, f_ms, b_ms in timed.values():
            f, b = one_ms(forward, flush=shape.name == "B3b"), one_ms(backward, flush=shape.name == "B3b")
            if i >= 5:
                f_ms.append(f)
                b_ms.append(b)
    for row in rows:
        if row["name"] in timed:
            _, _, f_ms, b_ms = timed[row["name"]]
            fwd, bwd = sorted(f_ms)[len(f_ms) // 2], sorted(b_ms)[len(b_ms) // 2]
            flops, size = shape.flops(), shape.bytes()
            row.update(
                fwd_ms=fwd,
                bwd_ms=bwd,
                fwd_tflops=flops[0] / fwd / 1e9,
                bwd_tflops=flops[1] / bwd / 1e9,
                fwd_tb_s=size[0] / fwd / 1e9,
                bwd_tb_s=size[1] / bwd / 1e9,
                matmul_now_tflops=rate,
            )
            if energy_s and row["name"].startswith("ours"):
                row.update(energy(timed[row["name"]][:2], len(shape.q_lengths), energy_s))
    return rows


def energy(calls: tuple[Callable, Callable], sequences: int, seconds: float) -> dict[str, float | str | None]:
    """Joules of one sequence, forward and backward apart, and why there are none."""
    found, why_not = {}, None
    for key, call in zip(("fwd", "bwd"), calls, strict=True):
        joules, why_not = joules_per_call(call, wait=torch.cuda.synchronize, at_least_s=seconds)
        found[f"{key}_joules_per_sequence"] = None if joules is None else joules / sequences
    return {**found, "energy_unavailable": why_not}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers")
    parser.add_argument("--out")
    parser.add_argument("--shapes", nargs="*", default=list(shapes()))
    parser.add_argument("--impls", nargs="*", default=["gluon", "triton"])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warm", help="fill the kernel caches for this shape and end")
    parser.add_argument("--only", nargs="*", help="these peers only")
    parser.add_argument("--energy-s", type=float, default=1.0, help="time to read the energy of each call of ours")
    args = parser.parse_args()
    if args.warm:
        compare(shapes()[args.warm], args.peers, args.impls, 0, args.only)
        return
    before = describe_working_device(0)
    run = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "matmul_tflops": matmul_tflops(),
        "copy_tb_s": copy_tb_s(),
        "method": "events, device spins before each step, contenders alternate, median of the rounds",
        "rows": [],
    }
    ceilings = {
        "bf16_matmul_flop_per_s": run["matmul_tflops"] * 1e12,
        "copy_bytes_per_s": run["copy_tb_s"] * 1e12,
    }
    print(before.name, {k: v for k, v in run.items() if k != "rows"}, flush=True)
    for name in args.shapes:
        for row in compare(shapes()[name], args.peers, args.impls, args.rounds, args.only, energy_s=args.energy_s):
            run["rows"].append(row)
            if "fwd_ms" in row:
                print(
                    f"{name:7s} {row['name']:28s} {row['fwd_ms']:.3f} / {row['bwd_ms']:.3f} ms  "
                    f"{row['fwd_tflops']:.0f} / {row['bwd_tflops']:.0f} TFLOP/s  {row['fwd_tb_s']:.2f} / "
                    f"{row['bwd_tb_s']:.2f} TB/s  matmul {row['matmul_now_tflops']:.0f}  "
                    f"diff {row['difference_from_first']}",
                    flush=True,
                )
            else:
                print(f"{name:7s} {row['name']:28s} {row['error']}", flush=True)
        torch.cuda.empty_cache()
        if args.out:
            run["matmul_tflops_at_end"] = matmul_tflops()
            write_record(Path(args.out), run, ceilings=ceilings, before=before)


if __name__ == "__main__":
    main()
