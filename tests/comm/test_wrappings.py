"""Codecs, tracing, differentiable forms, and refusals that need no second process."""

from __future__ import annotations

import pytest
import torch
from gem_comm.api import Trace, check_traces, make_codec, wrap
from gem_comm.differentiable import all_gather_rows, all_to_all, reduce_scatter_rows
from gem_comm.interface import CommError
from gem_comm.peer_copy import PeerCopyCollectives, why_not
from gem_comm.reference import run_ranks, thread_groups
from gem_comm.single import SingleCollectives
from gem_comm.traced import TracedCollectives
from hypothesis import given, settings
from hypothesis import strategies as st

CODECS = ("bf16", "fp8", "int8")


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 4), columns=st.integers(1, 40), scale=st.floats(-40, 30), seed=st.integers(0, 99))
def test_error_bounds_hold(name, rows, columns, scale, seed):
    codec = make_codec(name)
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, columns, generator=generator) * 12
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(scale - spread)
    payload = codec.encode(x)
    assert payload.shape == (rows, codec.row_bytes(columns))
    assert payload.dtype == torch.uint8
    error = (codec.decode(payload, columns).double() - x.double()).abs()
    assert bool((error <= codec.error_bound(x).double()).all())


@pytest.mark.parametrize("name", CODECS)
def test_bounds_are_not_idle(name):
    """Some number comes within a factor 2 of the bound: a bound ten times too wide would fail."""
    codec = make_codec(name)
    x = torch.linspace(0.5, 1.0, 20_001)[None]
    error = (codec.decode(codec.encode(x), x.shape[1]) - x).abs()
    assert float((error / codec.error_bound(x)).max()) > 0.5


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros_and_what_is_not_finite_shows(name):
    codec = make_codec(name)
    x = torch.zeros(4, 3)
    x[1, 1] = torch.nan
    x[2, 2] = torch.inf
    x[3] = torch.tensor([1.0, -2.0, 4.0])
    found = codec.decode(codec.encode(x), 3)
    assert found[0].tolist() == [0.0, 0.0, 0.0]
    assert not found[1].isfinite().all()
    assert not found[2].isfinite().all()
    assert found[3].tolist() == pytest.approx([1.0, -2.0, 4.0], rel=1 / 16)


def test_coded_sums_round_each_part_once():
    """Many ranks: the error of a sum is at most the sum of the parts' errors, not of n roundings of the sum."""
    n = 8
    groups = thread_groups([range(n)], axis="shard")
    parts = [torch.full((n, 64), 1.0 + rank / 3) for rank in range(n)]
    found = run_ranks(n, lambda rank: wrap(groups[rank], codec="bf16").reduce_scatter(parts[rank]))
    exact = sum(part[0].double() for part in parts)
    allowed = sum(make_codec("bf16").error_bound(part[:1])[0].double() for part in parts)
    assert bool(((found[0][0].double() - exact).abs() <= allowed + exact * 2**-22).all())
    in_bf16 = torch.zeros(64, dtype=torch.bfloat16)
    for part in parts:
        in_bf16 = in_bf16 + part[0].bfloat16()
    assert (in_bf16.double() - exact).abs().max() > (found[0][0].double() - exact).abs().max()


def test_unknown_codec():
    with pytest.raises(CommError, match="unknown codec 'fp-8'; did you mean 'fp8'"):
        wrap(SingleCollectives(), codec="fp-8")


def test_traces_of_equal_and_of_different_ranks():
    def work(rank):
        trace = Trace()
        comm = wrap(groups[rank], trace=trace)
        rows = 2 * rank
        comm.all_to_all(torch.ones(rows, 3), send_rows=(rank, rank), receive_rows=(0, 1))
        check_traces(trace, groups[rank])
        trace.clear()
        lonely = TracedCollectives(SingleCollectives(axis="expert"), trace)
        lonely.all_reduce(torch.ones(2), op="max" if rank else "sum")
        check_traces(trace, groups[rank])

    groups = thread_groups([range(2)], axis="world")
    with pytest.raises(CommError) as found:
        run_ranks(2, work)
    assert "the first difference is call 0: rank 0: all_reduce over expert: (2) float32 sum; rank 1: " in str(
        found.value
    )


def test_eager_traces_stop_before_the_call():
    groups = thread_groups([range(2)], axis="world")

    def work(rank):
        comm = TracedCollectives(groups[rank], Trace(), eager=True)
        comm.all_gather(torch.ones(3))
        comm.all_gather(torch.ones(3, dtype=torch.float64 if rank else torch.float32))

    with pytest.raises(CommError, match=r"call 1 over world differs.*\n.*rank 0: .*float32\n.*rank 1: .*float64"):
        run_ranks(2, work)


def test_a_failing_call_says_what_came_before():
    groups = thread_groups([range(2)], axis="world", limit_s=0.2)

    def work(rank):
        comm = TracedCollectives(groups[rank], Trace())
        comm.all_gather(torch.ones(3))
        if rank == 0:
            comm.all_reduce(torch.ones(1))

    with pytest.raises(CommError, match=r"call 1 failed: .*\n  call 0: all_gather over world: \(3\) float32"):
        run_ranks(2, work)


def test_gradients_of_an_uneven_all_to_all():
    groups = thread_groups([range(2)], axis="world")
    send = ((1, 2), (3, 0))

    def work(rank):
        x = torch.arange(3.0 * 2).view(3, 2).requires_grad_()
        y = all_to_all(x, groups[rank], send_rows=send[rank], receive_rows=[row[rank] for row in send])
        (y * (rank + 1)).sum().backward()
        return x.grad[:, 0].tolist()

    assert run_ranks(2, work) == [[1.0, 2.0, 2.0], [1.0, 1.0, 1.0]]


def test_second_derivative_goes_through():
    groups = thread_groups([range(2)], axis="world")

    def work(rank):
        x = torch.tensor([[2.0 + rank]], dtype=torch.float64, requires_grad=True)
        y = all_gather_rows(x, groups[rank], rows=(1, 1))
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return float(first.detach()), float(second)

    # both ranks' losses hold x^3, so first is 2 * 3 x^2, and its derivative 2 * 6 x
    assert run_ranks(2, work) == [(24.0, 24.0), (54.0, 36.0)]


@pytest.mark.parametrize("rows", [(1,), (1, -1), (2, 1)])
def test_wrong_counts(rows):
    groups = thread_groups([range(2)], axis="expert")
    with pytest.raises(CommError, match="over expert"):
        all_gather_rows(torch.ones(1, 2), groups[0], rows=rows)
    with pytest.raises(CommError, match="over expert"):
        reduce_scatter_rows(torch.ones(9, 2), groups[0], rows=rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_peer_copies_are_refused_with_a_reason():
    assert why_not(None, torch.device("cpu")) == "torch sees no CUDA device"
    with pytest.raises(CommError, match="impl='peer_copy' cannot run over axis 'shard': torch sees no CUDA device"):
        PeerCopyCollectives(SingleCollectives(axis="shard"), group=None, device=torch.device("cpu"))
