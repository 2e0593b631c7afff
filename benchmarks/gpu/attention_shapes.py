"""The benchmark shapes of jagged attention: lengths, masks, operation and byte counts, all exact.

B1 HSTU self attention, lengths log-normal (292,411 tokens in 256 sequences, 32 targets each); B1f the same kernel at
full length; B1s with heads of 64; B1w with a window of 256; B1r with a learned bias by relative position and time
bucket, shared by the heads, with gradients; B2 activation attention over 512 tokens, full and jagged;
B3a cross attention 1024 x 256; B3b seed pooling, 32 queries a sample; S1 and S1f the lengths of B1 and B1f with
softmax, causal, no targets: there PyTorch's own attentions do the same work. Operations count unmasked pairs only:
forward 4 H D P, backward 10 H D P (scores recomputed once). Bytes: every tensor once, bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from statistics import NormalDist

from gem_attention.interface import AttentionSpec, BiasSpec, MaskSpec, TimeBuckets


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One benchmark case. window counts the keys a row sees, itself included; 0 is none."""

    name: str
    heads: int
    dim: int
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool = False
    targets: int = 0
    window: int = 0
    bias: BiasSpec | None = None
    softmax: bool = False

    @property
    def is_self(self) -> bool:
        return self.causal

    def num_targets(self) -> list[int]:
        return [min(self.targets, n) for n in self.q_lengths]

    def spec(self) -> AttentionSpec:
        if not self.causal:
            return AttentionSpec(activation="gelu_tanh", scale=1.0, query="cross")
        if self.softmax:
            return AttentionSpec(activation="softmax", scale=self.dim**-0.5, mask=MaskSpec(causal=True))
        return AttentionSpec(
            activation="silu",
            scale=self.dim**-0.5,
            divisor=float(max(self.q_lengths)),
            mask=MaskSpec(causal=True, targets=self.targets > 0, window=max(self.window - 1, 0)),
            bias=self.bias,
        )

    def timestamps(self) -> list[int]:
        """Seconds of every packed token: log-normal gaps (median 20 s, one in a hundred over 1.8 hours), spread over a
        sequence by the golden ratio, none between the targets. No random numbers."""
        quantile = NormalDist().inv_cdf
        times = []
        for n, targets in zip(self.q_lengths, self.num_targets(), strict=True):
            now = 1_700_000_000
            for i in range(n):
                if i < n - targets:
                    now += round(20 * exp(2.5 * quantile(((i + 0.5) * 0.6180339887498949) % 1.0)))
                times.append(now)
        return times

    def pairs(self) -> int:
        total = 0
        for q, k in zip(self.q_lengths, self.k_lengths, strict=True):
            if not self.causal:
                total += q * k
            elif self.window:
                w = min(self.window, q)
                total += w * (w + 1) // 2 + (q - w) * w
            else:
                t = min(self.targets, q)
                h = q - t
                total += h * (h + 1) // 2 + t * (h + 1)
        return total

    def flops(self) -> tuple[int, int]:
        """(forward, backward)."""
        unit = self.heads * self.dim * self.pairs()
        return 4 * unit, 10 * unit

    def bytes(self) -> tuple[int, int]:
        """(forward, backward)."""
        q, k, row = sum(self.q_lengths), sum(self.k_lengths), 2 * self.heads * self.dim
        return row * (2 * q + 2 * k), row * (3 * q + 4 * k)


def log_normal_lengths(batch: int, median: int, sigma: float, low: int, high: int) -> tuple[int, ...]:
    """Quantiles of a log-normal law, clipped, in an order fixed by a prime stride: no random numbers."""
    quantile = NormalDist().inv_cdf
    lengths = [max(low, min(high, round(median * exp(sigma * quantile((i + 0.5) / batch))))) for i in range(batch)]
    stride = -int(-0.618 * batch // 1)
    while not _prime(stride) or batch % stride == 0:
        stride += 1
    ordered = [0] * batch
    for i, length in enumerate(lengths):
        ordered[i * stride % batch] = length
    return tuple(ordered)


def _prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def shapes() -> dict[str, Shape]:
    b1 = log_normal_lengths(256, 768, 1.0, 32, 4096)
    full = (4096,) * 32
    jagged = tuple(max(1, round((i + 0.5) / 1152 * 512)) for i in range(1152))
    pooled = log_normal_lengths(2048, 256, 1.0, 16, 2048)
    bias = BiasSpec(where="inside_scale", max_positions=4096, time=TimeBuckets(function="log", step=0.301, count=128))
    listed = [
        Shape(name="B1", heads=4, dim=128, q_lengths=b1, k_lengths=b1, causal=True, targets=32),
        Shape(name="B1f", heads=4, dim=128, q_lengths=full, k_lengths=full, causal=True),
        Shape(name="B1s", heads=8, dim=64, q_lengths=b1, k_lengths=b1, causal=True, targets=32),
        Shape(name="B1w", heads=4, dim=128, q_lengths=b1, k_lengths=b1, causal=True, window=256),
        Shape(name="B1r", heads=4, dim=128, q_lengths=b1, k_lengths=b1, causal=True, targets=32, bias=bias),
        Shape(name="B2full", heads=4, dim=128, q_lengths=(512,) * 1152, k_lengths=(512,) * 1152),
        Shape(name="B2jag", heads=4, dim=128, q_lengths=jagged, k_lengths=jagged),
        Shape(name="B3a", heads=4, dim=128, q_lengths=(1024,) * 1152, k_lengths=(256,) * 1152),
        Shape(name="B3b", heads=4, dim=128, q_lengths=(32,) * 2048, k_lengths=pooled),
        Shape(name="S1", heads=4, dim=128, q_lengths=b1, k_lengths=b1, causal=True, softmax=True),
        Shape(name="S1f", heads=4, dim=128, q_lengths=full, k_lengths=full, causal=True, softmax=True),
    ]
    return {s.name: s for s in listed}
