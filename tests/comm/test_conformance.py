"""Implementations that need one process: the reference's threads, the identity, and every wrapping of them."""

from __future__ import annotations

import pytest
import torch
from gem_comm.api import Trace, Traffic, wrap
from gem_comm.interface import Call, Collectives, CommError
from gem_comm.quantized import CODECS, make_codec
from gem_comm.reference import run_ranks, thread_groups
from gem_comm.single import SingleCollectives
from gem_comm.testing import CHECKS, Quirks, check_codec, check_rank


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_threads(size, check):
    groups = thread_groups([range(size)], axis="expert")
    run_ranks(size, lambda rank: check(groups[rank], Quirks()))


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("size", [1, 3])
def test_codecs(codec, size):
    groups = thread_groups([range(size)], axis="shard")
    run_ranks(size, lambda rank: check_rank(wrap(groups[rank], codec=codec), Quirks(codec=codec)))


@pytest.mark.parametrize("name", CODECS)
def test_codecs_alone(name):
    check_codec(make_codec(name))


def test_a_codec_as_an_object():
    groups = thread_groups([range(2)], axis="shard")
    codec = make_codec("int8")
    run_ranks(2, lambda rank: check_rank(wrap(groups[rank], codec=codec), Quirks(codec=codec)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"error_bound": lambda x: torch.zeros_like(x, dtype=torch.float32)}, "over"),
        ({"row_bytes": lambda columns: columns}, "row_bytes"),
        ({"decode": lambda payload, columns: torch.zeros(payload.shape[0], columns)}, "over"),
    ],
)
def test_the_suite_sees_a_wrong_codec(wrong, words, monkeypatch):
    codec = make_codec("int8")
    for name, method in wrong.items():
        monkeypatch.setattr(codec, name, method)
    with pytest.raises(AssertionError, match=words):
        check_codec(codec)


def test_counting_and_tracing_change_nothing():
    groups = thread_groups([range(2)], axis="shard")
    run_ranks(2, lambda rank: check_rank(wrap(groups[rank], traffic=Traffic(), trace=Trace()), Quirks()))


def test_single():
    check_rank(SingleCollectives(axis="shard"), Quirks())


class Shifted(Collectives):
    """Collectives with one mistake: results come a position late."""

    def __init__(self, inner, kind):
        self.axis, self.ranks, self.rank, self.size = inner.axis, inner.ranks, inner.rank, inner.size
        self.inner, self.kind = inner, kind

    def launch(self, call):
        pending = self.inner.launch(call)
        if call.kind != self.kind or call.x is None:
            return pending
        wrong = pending.wait().roll(1, 0)
        if call.out is not None:
            call.out.copy_(wrong)
            wrong = call.out

        class Late:
            def wait(self):
                return wrong

        return Late()


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
def test_the_suite_sees_a_mistake(kind):
    groups = thread_groups([range(2)], axis="shard", limit_s=5)
    with pytest.raises(AssertionError, match=kind):
        run_ranks(2, lambda rank: check_rank(Shifted(groups[rank], kind), Quirks()))


def test_the_suite_sees_a_codec_that_loses_more_than_it_says():
    groups = thread_groups([range(2)], axis="shard", limit_s=5)
    with pytest.raises(AssertionError, match="more than allowed"):
        run_ranks(2, lambda rank: check_rank(wrap(groups[rank], codec="int8"), Quirks(codec="bf16")))


def test_ranks_that_call_different_things_are_told():
    groups = thread_groups([range(2)], axis="shard", limit_s=5)

    def work(rank):
        kind = "all_gather" if rank else "all_reduce"
        return groups[rank].start(Call(kind=kind, x=torch.ones(2))).wait()

    with pytest.raises(CommError, match="ranks disagree"):
        run_ranks(2, work)
