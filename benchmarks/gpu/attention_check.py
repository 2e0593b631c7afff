"""Check the GPU kernels against float64: `python attention_check.py [--impl triton gluon] [--own]`.

Every member of the family that differs in code, on ragged lengths with empty and one-token sequences. Rule: the error
against float64 is at most 2x (output) or 3x (gradients) the error of impl="eager" in the same dtype, plus 1e-6. Outputs
are compared in full, so an element nobody wrote shows.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace

import torch
from gem_attention.api import attention, make_layout
from gem_attention.interface import AttentionSpec, BiasSpec, CannotRunError, MaskSpec, TimeBuckets

SELF = (700, 0, 1, 333, 128, 64)


@dataclass(frozen=True, kw_only=True)
class Case:
    spec: AttentionSpec
    q_lengths: tuple[int, ...] = SELF
    k_lengths: tuple[int, ...] = SELF
    heads: int = 2
    kv_heads: int = 2
    dim: int = 128
    v_dim: int = 128
    targets: tuple[int, ...] = (40, 0, 0, 32, 128, 3)
    context: tuple[int, ...] = (130, 0, 1, 5, 0, 3)
    kv_index: tuple[int, ...] | None = None
    seeds: int = 0
    dtype: torch.dtype = torch.bfloat16
    sorted_times: bool = False


def spec(activation: str = "silu", scale: float = 0.1, **rest: object) -> AttentionSpec:
    return AttentionSpec(activation=activation, scale=scale, **rest)


def cases() -> list[Case]:
    causal = MaskSpec(causal=True)
    targets = MaskSpec(causal=True, targets=True)
    both = MaskSpec(causal=True, targets=True, context=True)
    cross = {"q_lengths": (5, 0, 300, 3), "k_lengths": (700, 4, 0, 165)}
    shared = {"q_lengths": (5, 0, 300, 33, 64), "k_lengths": (150, 0, 265), "kv_index": (0, 0, 1, 2, 2)}
    tail = {
        "q_lengths": (5, 0, 300, 3),
        "k_lengths": (150, 4, 500, 65),
        "targets": (7, 1, 40, 0),
        "context": (3, 1, 9, 0),
    }
    listed = [
        Case(spec=spec(activation, mask=causal))
        for activation in ("silu", "softmax", "gelu", "gelu_tanh", "gelu_poly", "relu", "relu2", "identity")
    ]
    for dim in (32, 64, 96, 256):
        listed += [Case(spec=spec(a, mask=targets), dim=dim, v_dim=dim) for a in ("silu", "softmax")]
    listed.append(Case(spec=spec(mask=targets), dim=64, v_dim=128))
    for mask in (
        MaskSpec(),
        both,
        MaskSpec(causal=True, window=100),
        MaskSpec(causal=True, window=20, context=True, targets=True, semantics="meta"),
        MaskSpec(causal=True, window=200, context=True, targets=True, semantics="nvidia", target_group_size=7),
        MaskSpec(causal=True, window=70, min_full_rows=20, targets=True, semantics="meta"),
        MaskSpec(window=30, min_full_rows=9, context=True),
        MaskSpec(targets=True, semantics="meta"),
        MaskSpec(block=64),
    ):
        listed += [Case(spec=spec(a, mask=mask)) for a in ("silu", "softmax")]
    listed += [
        Case(spec=spec(mask=targets), dtype=torch.float16),
        Case(spec=spec("softmax", mask=causal), dtype=torch.float16),
        Case(spec=spec(mask=causal), dtype=torch.float32, dim=64, v_dim=64),
        Case(spec=spec(mask=causal, divisor="per_token")),
        Case(spec=spec(mask=targets), heads=4, kv_heads=2),
        Case(spec=spec("softmax", mask=causal), heads=4, kv_heads=1),
        Case(spec=spec("gelu_tanh", query="cross"), **cross),
        Case(spec=spec("softmax", query="cross"), **cross),
        Case(spec=spec("gelu_tanh", query="cross"), q_lengths=(5, 0, 32, 3), k_lengths=(700, 4, 0, 165)),
        Case(spec=spec("gelu_tanh", query="cross", divisor="per_token"), q_lengths=(64, 9), k_lengths=(700, 100)),
        Case(spec=spec("silu", query="cross"), **shared),
        Case(spec=spec("softmax", query="cross"), heads=4, **shared),
        Case(spec=spec("silu", query="broadcast"), seeds=32, k_lengths=(700, 0, 65)),
        Case(spec=spec("softmax", query="broadcast"), seeds=32, k_lengths=(700, 0, 65)),
        Case(spec=spec("silu", query="broadcast", divisor="per_token"), seeds=130, k_lengths=(700, 0, 65)),
        Case(spec=spec("silu", query="tail", mask=both), **tail),
        Case(spec=spec("softmax", query="tail", mask=MaskSpec(causal=True, window=60, context=True)), **tail),
    ]
    for where in ("inside_scale", "outside_scale"):
        bias = BiasSpec(where=where, max_positions=800, time=TimeBuckets(count=60))
        listed += [Case(spec=spec(a, mask=causal, bias=bias)) for a in ("silu", "softmax")]
    # times as histories have them, sorted: tiles span few buckets
    listed.append(Case(spec=spec(mask=both, bias=bias), sorted_times=True))
    listed.append(Case(spec=spec(mask=targets, bias=bias), dim=64, v_dim=64, sorted_times=True))
    return listed


def run_case(case: Case, impl: str) -> tuple[bool, str]:
    """Errors of output and gradients of impl and of eager, against float64."""
    torch.manual_seed(0)
    kind = case.spec.query

    def on_gpu(values: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device="cuda")

    def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
        return on_gpu((0, *lengths)).cumsum(0)

    has_time = case.spec.bias is not None and case.spec.bias.time is not None
    times = torch.randint(0, 10**6, (sum(case.k_lengths),), device="cuda")
    layout = make_layout(
        q_offsets=None if kind == "broadcast" else offsets(case.q_lengths),
        k_offsets=None if kind == "self" else offsets(case.k_lengths),
        kv_index=None if case.kv_index is None else on_gpu(case.kv_index),
        num_targets=on_gpu(case.targets) if case.spec.mask.targets else None,
        num_context=on_gpu(case.context) if case.spec.mask.context else None,
        timestamps=(times.sort().values if case.sorted_times else times) if has_time else None,
        tail=kind == "tail",
    )
    k_rows = sum(case.q_lengths if kind == "self" else case.k_lengths)
    q_rows = case.seeds or sum(case.q_lengths)
    inputs = {
        "q": torch.randn(q_rows, case.heads, case.dim, device="cuda"),
        "k": torch.randn(k_rows, case.kv_heads, case.dim, device="cuda"),
        "v": torch.randn(k_rows, case.kv_heads, case.v_dim, device="cuda"),
    }
    if case.spec.bias is not None:
        inputs["position_table"] = torch.randn(case.heads, 2 * case.spec.bias.max_positions - 1, device="cuda")
        if case.spec.bias.time is not None:
            inputs["time_table"] = torch.randn(1, case.spec.bias.time.count, device="cuda")
    inputs = {name: t.to(case.dtype) for name, t in inputs.items()}
    divisor = None
    if case.spec.divisor == "per_token":
        divisor = torch.rand(q_rows * (layout.batch_size if case.seeds else 1), device="cuda") + 0.5
    out_shape = (q_rows, case.heads, case.v_dim)
    do = torch.randn((layout.batch_size, *out_shape) if case.seeds else out_shape, device="cuda").to(case.dtype)

    def results(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = {key: t.to(dtype).requires_grad_() for key, t in inputs.items()}
        out = attention(spec=case.spec, layout=layout, divisor=divisor, impl=name, **leaves)
        return [out, *torch.autograd.grad(out, list(leaves.values()), do.to(dtype))]

    truth = results("reference", torch.float64)
    scale = [max(float(t.detach().norm()), 1e-30) for t in truth]

    def errors(got: list[torch.Tensor]) -> list[float]:
        return [float((g.double() - t).detach().norm()) / s for g, t, s in zip(got, truth, scale, strict=True)]

    plain, ours = errors(results("eager", case.dtype)), errors(results(impl, case.dtype))
    again = results(impl, case.dtype)
    moved = [
        n for n, a, b in zip(["out", *inputs], results(impl, case.dtype), again, strict=True) if not torch.equal(a, b)
    ]
    allowed = [2 * plain[0] + 1e-6, *(3 * e + 1e-6 for e in plain[1:])]
    ok = all(o <= a for o, a in zip(ours, allowed, strict=True))
    text = " ".join(f"{o:.5f}/{e:.5f}" for o, e in zip(ours, plain, strict=True))
    return ok, text + (f" moves: {','.join(moved)}" if moved else "")


def take_own_blocks() -> None:
    """Let every Gluon kernel run with Choice(own=True), its default otherwise."""
    from gem_attention import gluon_launch

    chosen = gluon_launch.default_choice
    gluon_launch.default_choice = lambda p, kernel: replace(chosen(p, kernel), own=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", nargs="*", default=["triton"])
    parser.add_argument("--limit-s", type=float, default=500)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="run cases i, i + n, ... of i n")
    parser.add_argument("--own", action="store_true", help="impl gluon with Choice(own=True), see gluon_launch")
    args = parser.parse_args()
    if args.own:
        take_own_blocks()
    start, bad, count, refused = time.perf_counter(), 0, 0, 0
    for impl in args.impl:
        for case in cases()[args.part[0] :: args.part[1]]:
            if time.perf_counter() - start > args.limit_s:
                print("STOPPED: out of time")
                sys.exit(1)
            try:
                ok, text = run_case(case, impl)
            except CannotRunError as error:
                refused += 1
                print(f"refused: {error}", flush=True)
                continue
            except Exception as error:
                ok, text = False, f"{type(error).__name__}: {str(error)[:400]}"
            count += 1
            bad += not ok
            mask = ",".join(
                f"{k}={v}" for k, v in vars(case.spec.mask).items() if v and (k, v) != ("target_group_size", 1)
            )
            print(
                f"{'ok ' if ok else 'BAD'} {impl}{' own' if args.own else ''} {case.spec.activation} {case.spec.query} "
                f"D{case.dim} "
                f"H{case.heads}/{case.kv_heads} {str(case.dtype)[6:]} [{mask}]"
                f"{' bias' if case.spec.bias else ''} {text}",
                flush=True,
            )
    print(f"{count - bad} of {count} cases ok, {refused} refused, in {time.perf_counter() - start:.0f} s")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
