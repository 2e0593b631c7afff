"""The block's Triton kernels, in Triton's interpreter, against the shipped suite and against what they promise.

The interpreter must be on before triton is imported, so all checks run in one child process (this file as a program),
which reports one line a check. float16: the interpreter rounds bfloat16 towards zero, which no GPU does.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from gem_attention import block_api
from gem_attention.block_counting import saved_bytes_per_token
from gem_attention.block_recompute import SavedBytes
from gem_attention.block_testing import BlockQuirks, conformance, named
from gem_attention.interface import CannotRunError, GateSpec, HstuSpec, ProjectionSpec, RecomputeSpec, RotarySpec
from gem_attention.testing import row_error

FAST = (
    "layer-silu-all-float16",
    "layer-silu-u-float32",
    "rms-silu-last-again-float16",
    "rms-halves-24-float32",
    "layer-interleaved-12-float16",
    "layer-off-centre-float32",
    "rms-no-tokens-float32",
    "gate-layer-silu-per-head-float16",
    "gate-rms-sigmoid-float32",
    "gate-no-tokens-float16",
    "tiles",
    "strided",
    "unused-outputs",
    "recompute",
    "saved-bytes",
    "freed",
    "repeatable",
    "opcheck",
    "compiled",
)
TIMEOUT_S = 900


def _run(names: list[str]) -> dict[str, str]:
    child = subprocess.run(
        [sys.executable, __file__, *names],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def fast_results():
    pytest.importorskip("triton")
    return _run(list(FAST))


@pytest.mark.parametrize("name", FAST)
def test_kernels_in_the_interpreter(name, fast_results):
    assert fast_results[name] == "ok"


@pytest.mark.slow
def test_the_whole_suite_in_the_interpreter():
    results = _run([])
    assert len(results) > 60
    assert {name: text for name, text in results.items() if text != "ok"} == {}


def test_without_the_interpreter_the_cpu_is_refused():
    x, u = torch.ones(2, 4), torch.ones(2, 1, 4)
    with pytest.raises(CannotRunError, match="TRITON_INTERPRET=1"):
        block_api.norm_linear(x, x, spec=ProjectionSpec(widths=(2,)), impl="triton")
    with pytest.raises(CannotRunError, match=r"dtype torch\.float64 is not among"):
        block_api.gated(u.double(), x.double(), spec=GateSpec(), impl="triton")


# ------------------------------------------------------------------------------------------------ in the child

HSTU = HstuSpec(dim=24, heads=2, qk_dim=8, v_dim=12, rotary=RotarySpec(pairing="halves"))
ALL = replace(HSTU, activated="all", norm="rms", per_head=True)


class Toy(torch.autograd.Function):
    """Stands for attention: keeps q, k and v, as a pointwise attention does, and mixes no tokens."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return ((q * k).sum(-1, keepdim=True) / 16).sigmoid() * v

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        weight = ((q * k).sum(-1, keepdim=True) / 16).sigmoid()
        ds = (do * v).sum(-1, keepdim=True) * weight * (1 - weight) / 16
        return ds * k, ds * q, do * weight


def leaves(spec: HstuSpec, tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    widths = spec.projection.widths
    shapes = ((tokens, spec.dim), (sum(widths), spec.dim), (spec.dim, widths[0]))
    return [(torch.randn(*shape, generator=generator) * 0.5).to(dtype).requires_grad_() for shape in shapes]


def table_of(spec: HstuSpec, tokens: int) -> torch.Tensor:
    return block_api.rotary_table(torch.linspace(0, 9, tokens * spec.qk_dim // 2).view(tokens, -1))


def all_flags(spec: HstuSpec) -> list[RecomputeSpec]:
    """Every combination of the flags that mean something for the spec (norm(x) never exists here: once is enough)."""
    names = ("preactivations", "gated", "projected") if spec.activated == "all" else ("gated", "projected")
    choices = itertools.product((False, True), repeat=len(names))
    made = [RecomputeSpec(**dict(zip(names, choice, strict=True))) for choice in choices]
    return [*made, RecomputeSpec(normed_x=True)]


def block(spec, given, recompute, impl, attention=Toy.apply):
    return block_api.hstu_block(
        *given,
        attention=attention,
        spec=spec,
        table=table_of(spec, given[0].shape[0]),
        recompute=recompute,
        impl=impl,
    )


TOKENS = 9


@functools.cache
def runs(spec: HstuSpec) -> list[tuple[RecomputeSpec, int, list[torch.Tensor]]]:
    """Every combination of flags: the bytes that autograd keeps, the output and the gradients."""
    made = []
    for recompute in all_flags(spec):
        given = leaves(spec, TOKENS)
        table = table_of(spec, TOKENS)
        with SavedBytes(exclude=[*given[1:], table]) as saved:
            out = block_api.hstu_block(
                *given, attention=Toy.apply, spec=spec, table=table, recompute=recompute, impl="triton"
            )
        total = saved.total()
        made.append((recompute, total, [out.detach(), *torch.autograd.grad(out.square().sum(), given)]))
    return made


def check_saved_bytes():
    """What autograd keeps is what the formula says, to the byte, for every combination of flags."""
    for spec, different in ((HSTU, 4), (ALL, 6)):  # of "all", two flags are worth the same
        for recompute, total, _ in runs(spec):
            expected = TOKENS * sum(saved_bytes_per_token(spec, recompute, element_bytes=4).values())
            assert total == expected, (spec.activated, recompute, total, expected)
        assert len({total for _, total, _ in runs(spec)}) == different


def check_recompute():
    """No flag changes a bit of the output or of a gradient, and the block equals the reference's."""
    for spec in (HSTU, ALL):
        (_, _, kept), *changed = runs(spec)
        for recompute, _, found in changed:
            assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True)), (spec.activated, recompute)
        others = []
        for dtype, impl in ((torch.float64, "reference"), (torch.float32, "eager")):
            given = leaves(spec, TOKENS, dtype)
            table = table_of(spec, TOKENS).to(dtype)
            out = block_api.hstu_block(*given, attention=Toy.apply, spec=spec, table=table, impl=impl)
            others.append([out.detach(), *torch.autograd.grad(out.square().sum(), given)])
        for ours, truth, plain in zip(kept, *others, strict=True):
            assert row_error(ours, truth) <= 3 * row_error(plain, truth)


def check_freed():
    """`projected` really lets go of u, v, q and k between forward and backward."""
    from torch.multiprocessing.reductions import StorageWeakRef

    for projected in (False, True):
        seen = []

        def watched(q, k, v, seen=seen):
            seen.extend(StorageWeakRef(x.untyped_storage()) for x in (q, k, v))
            return Toy.apply(q, k, v)

        out = block(HSTU, leaves(HSTU, 4), RecomputeSpec(projected=projected), "triton", watched)
        assert [ref.expired() for ref in seen] == [projected] * 3
        out.sum().backward()


def check_tiles():
    """Other tiles, fewer programs than tiles, sums before the product: the same up to rounding."""
    from gem_attention import block_launch
    from gem_attention.block_launch import BlockTiles

    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(70, 40, generator=generator) + 2, torch.randn(100, 40, generator=generator)
    table = block_api.rotary_table(torch.rand(70, 6, generator=generator))
    spec = ProjectionSpec(
        widths=(40, 36, 24), silu=(1,), turned=(1, 2), rotary=RotarySpec(pairing="halves"), head_dim=12
    )
    base, preacts, stats = block_launch.project(x, w, table, spec=spec, keep=True)
    g = torch.randn(70, 100, generator=generator)
    dots = torch.randn(2, 70, generator=generator)
    dx = block_launch.input_gradient(g, w, x, stats, dots, spec=spec)
    plain = BlockTiles(block_m=32, block_n=32, block_k=16, tma=False, programs=0, flatten=False)
    for tiles in (
        replace(plain, beside=False),
        replace(plain, programs=1),  # 4 programs for more tiles
        replace(plain, block_m=16, block_n=64, block_k=64),
    ):
        outs, zs, again = block_launch.project(x, w, table, spec=spec, keep=True, tiles=tiles)
        for a, b in zip([*outs, *zs, *again], [*base, *preacts, *stats], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(
            block_launch.input_gradient(g, w, x, stats, dots, spec=spec, tiles=tiles), dx, rtol=2e-5, atol=2e-5
        )


def check_strided():
    """Inputs and gradients with any strides give what contiguous ones give, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(33, 24, generator=generator), torch.randn(40, 24, generator=generator)
    spec = ProjectionSpec(widths=(24, 16), silu=(0,))
    grads = [torch.randn(33, width, generator=generator) for width in spec.widths]
    found = []
    for change in (lambda t: t, lambda t: t.t().contiguous().t(), lambda t: torch.cat([t, t], 1)[:, : t.shape[1]]):
        leaf = change(x).detach().requires_grad_()
        weight = change(w).detach().requires_grad_()
        outs = block_api.norm_linear(leaf, weight, spec=spec, impl="triton")
        found.append([*outs, *torch.autograd.grad(outs, (leaf, weight), [change(g) for g in grads])])
        a = change(x).unflatten(1, (2, 12)).detach().requires_grad_()
        u = change(x * 2).detach().requires_grad_()
        y = block_api.gated(a, u, spec=GateSpec(activation="silu"), impl="triton")
        found[-1] += [y, *torch.autograd.grad(y, (a, u), change(x))]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


def check_unused_outputs():
    """An output that nothing is derived from counts as gradient zero."""
    generator = torch.Generator().manual_seed(2)
    for silu in ((), (0, 1)):
        spec = ProjectionSpec(widths=(16, 24), silu=silu)
        for dtype, impl in ((torch.float64, "reference"), (torch.float32, "triton")):
            generator.manual_seed(2)
            x = torch.randn(9, 16, generator=generator).to(dtype).requires_grad_()
            w = torch.randn(40, 16, generator=generator).to(dtype).requires_grad_()
            _, second = block_api.norm_linear(x, w, spec=spec, impl=impl)
            grads = torch.autograd.grad(second.sum(), (x, w))
            if impl == "reference":
                truth = grads
        assert torch.equal(grads[1][:16], torch.zeros(16, 16))
        for a, b in zip(grads, truth, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def check_repeatable():
    """Two runs give the same bits."""
    runs = []
    for _ in range(2):
        given = leaves(ALL, 40)
        out = block(ALL, given, RecomputeSpec(), "triton")
        runs.append([out.detach(), *torch.autograd.grad(out.sum(), given)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def check_opcheck():
    """Every operator by torch.library.opcheck: schema, fake results, no aliasing."""
    from gem_attention import block_ops

    spec = ProjectionSpec(widths=(16, 24), silu=(0, 1))
    text = spec.to_text()
    x, w = torch.randn(9, 16), torch.randn(40, 16)
    outs = block_ops.project(x, w, None, text, True)
    mean, rstd = outs[-2:]
    grads, preacts = [outs[0], outs[1]], [outs[2], outs[3]]
    g, dots, _ = block_ops.project_gradient(grads, preacts, w, None, mean, rstd, text, True)
    a, u, gate = torch.randn(5, 2, 8), torch.randn(5, 16), '{"activation": "silu"}'
    _, gate_mean, gate_rstd = block_ops.gate(a, u, gate)
    tests = ("test_schema", "test_faketensor")
    for op, arguments in (
        (block_ops.project, (x, w, None, text, True)),
        (block_ops.project, (x, w, None, ProjectionSpec(widths=(40,), norm="rms").to_text(), False)),
        (block_ops.preactivations, (x, w, ProjectionSpec(widths=(16, 24), silu=(1,)).to_text())),
        (block_ops.project_gradient, (grads, preacts, w, None, mean, rstd, text, True)),
        (block_ops.input_gradient, (g, w, x, mean, rstd, dots, text)),
        (block_ops.norm_gradient, (x, x, mean, rstd, text)),
        (block_ops.gate, (a, u, gate)),
        (block_ops.gate_gradient, (u, a, u, gate_mean, gate_rstd, gate, True)),
    ):
        torch.library.opcheck(op, arguments, test_utils=tests)


def check_compiled():
    """torch.compile traces the block in one graph, and nothing changes."""
    for spec, recompute in ((HSTU, RecomputeSpec()), (ALL, RecomputeSpec(preactivations=True, gated=True))):

        def run(*given, spec=spec, recompute=recompute):
            def weighted(q, k, v):
                return (q * k).sum(-1, keepdim=True).sigmoid() * v

            return block(spec, given, recompute, "triton", weighted)

        given = leaves(spec, 9)
        out, expected = torch.compile(run, fullgraph=True, backend="aot_eager")(*given), run(*given)
        assert torch.equal(out, expected)
        grads = (torch.autograd.grad(y.square().sum(), given) for y in (out, expected))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


OWN = {
    "compiled": check_compiled,
    "tiles": check_tiles,
    "strided": check_strided,
    "unused-outputs": check_unused_outputs,
    "recompute": check_recompute,
    "saved-bytes": check_saved_bytes,
    "freed": check_freed,
    "repeatable": check_repeatable,
    "opcheck": check_opcheck,
}


def main() -> None:
    quirks = BlockQuirks(dtypes=(torch.float32, torch.float16, torch.bfloat16))
    suite = {str(c): functools.partial(c, named("triton")) for c in conformance(quirks)}
    known = suite | {name: functools.partial(check) for name, check in OWN.items()}
    results = {}
    for name in sys.argv[1:] or known:
        try:
            known[name]()
            results[name] = "ok"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"[:600]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
