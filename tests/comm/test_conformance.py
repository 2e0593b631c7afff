"""Implementations that need one process: the reference's threads, the identity, and every wrapping of them."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from gem_comm.api import Trace, Traffic, wrap
from gem_comm.interface import Call, Collectives, CommError
from gem_comm.quantized import CODECS, make_codec
from gem_comm.reference import ThreadCollectives, run_ranks, thread_groups
from gem_comm.single import Done, SingleCollectives
from gem_comm.testing import (
    CHECKS,
    Quirks,
    _share,
    check_all_to_all,
    check_barrier,
    check_calls,
    check_codec,
    check_moves,
    check_new,
    check_out,
    check_rank,
    check_reductions,
    check_views,
)


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


INT8 = make_codec("int8")


def changes_x(x):
    payload = INT8.encode(x)
    x.copy_(INT8.decode(payload, x.shape[1]))
    return payload


def changes_bytes(payload, columns):
    found = INT8.decode(payload, columns)
    payload.zero_()
    return found


def one_buffer(make, kept):
    """The results of `make`, all of one size in the same memory."""

    def again(*arguments):
        found = make(*arguments)
        return kept.setdefault(tuple(found.shape), torch.empty_like(found)).copy_(found)

    return again


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"error_bound": lambda x: torch.zeros_like(x, dtype=torch.float32)}, "over"),
        ({"row_bytes": lambda columns: columns}, "row_bytes"),
        ({"decode": lambda payload, columns: torch.zeros(payload.shape[0], columns)}, "over"),
        ({"encode": changes_x}, "x was changed"),
        ({"error_bound": lambda x: INT8.error_bound(x.mul_(0.5)) * 2}, "x was changed"),
        ({"decode": changes_bytes}, "decode changed the bytes"),
        ({"encode": one_buffer(INT8.encode, {})}, "the next rows' bytes"),
        ({"decode": one_buffer(INT8.decode, {})}, "the next rows' numbers"),
        (
            {
                "decode": lambda payload, columns: INT8.decode(payload, columns) * 0,
                "error_bound": lambda x: x.abs().float(),
            },
            "at most 0.125 of the row's largest",
        ),
        ({"error_bound": lambda x: INT8.error_bound(x) * 40}, "at most 0.125 of the row's largest"),
        ({"error_bound": lambda x: INT8.error_bound(x) + 1e-3}, "at most 0.125"),  # seen on the row of zeros
        (
            {
                "decode": lambda payload, columns: INT8.decode(payload, columns) + 1e-10,
                "error_bound": lambda x: INT8.error_bound(x) * (1 + 1e-5) + 2e-10,
            },
            "a row of zeros came as",
        ),
    ],
)
def test_the_suite_sees_a_wrong_codec(wrong, words, monkeypatch):
    codec = make_codec("int8")
    for name, method in wrong.items():
        monkeypatch.setattr(codec, name, method)
    with pytest.raises(AssertionError, match=words):
        check_codec(codec)


def test_a_codec_may_name_its_own_share():
    codec = make_codec("int8")
    check_codec(codec, error_share=0.004)  # half a scale: 0.5 / 127 of the largest
    with pytest.raises(AssertionError, match=r"at most 0.0039 "):
        check_codec(codec, error_share=0.0039)
    with pytest.raises(ValueError, match="below 1"):
        check_codec(codec, error_share=1.0)


def test_a_codec_may_name_an_absolute_error(monkeypatch):
    codec = make_codec("int8")
    monkeypatch.setattr(codec, "error_bound", lambda x: INT8.error_bound(x) + 1e-12)
    check_codec(codec)
    check_codec(codec, error_floor=1e-11)
    with pytest.raises(AssertionError, match=r"number .*plus 1e-13"):
        check_codec(codec, error_floor=1e-13)
    monkeypatch.setattr(codec, "error_bound", lambda x: INT8.error_bound(x) + 1e-3)
    check_codec(codec, error_floor=2e-3)
    for wrong in (-1e-9, 1.0, float("nan")):
        with pytest.raises(ValueError, match=f"error_floor is {wrong}"):
            check_codec(codec, error_floor=wrong)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"kinds": ()}, "without kinds nothing is tested"),
        ({"kinds": ("all_gather", "gather")}, "expected some of"),
        ({"move_dtypes": ()}, r"\['all_gather', 'all_to_all', 'broadcast'\] would not be tested"),
        ({"reduce_dtypes": (), "kinds": ("barrier", "all_reduce")}, r"\['all_reduce'\] would not be tested"),
    ],
)
def test_quirks_that_leave_nothing_to_test(claims, words):
    with pytest.raises(ValueError, match=words):
        Quirks(**claims)
    Quirks(kinds=("barrier",), move_dtypes=(), reduce_dtypes=())


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


class Faulty(ThreadCollectives):
    """The reference with one mistake: what `wrong` of a subclass makes of calls of `kind`."""

    kind = "all_gather"

    def right(self, call):
        return super().launch(call)

    def launch(self, call):
        return self.wrong(call) if call.kind == self.kind else self.right(call)


class LastSource(Faulty):
    kind = "broadcast"

    def wrong(self, call):
        return self.right(replace(call, source=self.size - 1))


class GivesX(Faulty):
    """The source of a broadcast, and a group of one, get x itself."""

    def wrong(self, call):
        pending = self.right(call)
        mine = self.size == 1 or (call.kind == "broadcast" and self.rank == call.source)
        return Done(call.x) if mine and call.out is None else pending


class NoOut(Faulty):
    def wrong(self, call):
        return self.right(replace(call, out=None))


class NoStrides(Faulty):
    """Reads x as if its numbers lay one after the other."""

    def wrong(self, call):
        x = call.x
        return self.right(replace(call, x=x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())))


class OneBuffer(Faulty):
    """Results of one size lie in the same memory, that of the call before."""

    def wrong(self, call):
        found, kept = self.right(call).wait(), self.__dict__.setdefault("kept", {})
        same = kept.setdefault((tuple(found.shape), found.dtype), torch.empty_like(found))
        return Done(same.copy_(found) if call.out is None else found)


class OneForAll(Faulty):
    """Ranks of a process get the same tensor."""

    def wrong(self, call):
        found = self.right(call).wait()
        self.number = getattr(self, "number", 0) + 1
        return Done(self._meeting.__dict__.setdefault(f"result {self.number}", found))


class OneAllocation(Faulty):
    """Right: results are parts of one allocation that lie beside each other."""

    def wrong(self, call):
        found = self.right(call).wait()
        if call.out is not None:
            return Done(found)
        memory, used = self.__dict__.setdefault("memory", {}).get(found.dtype, (found.new_empty(1 << 15), 0))
        self.memory[found.dtype] = memory, used + found.numel()
        assert used + found.numel() <= memory.numel(), "the test needs more memory"
        return Done(memory[used : used + found.numel()].view(found.shape).copy_(found))


class InPlace(Faulty):
    def wrong(self, call):
        found = self.right(call).wait()
        self._meeting.exchange(self.rank, Call(kind="barrier"))  # or another rank may still read x
        call.x.add_(1)
        return Done(found)


class BeginsMaximum(ThreadCollectives):
    def begin(self, kind, x):
        return self.start(Call(kind=kind, x=x, op="max"))


class SumsToMean(ThreadCollectives):
    def all_reduce(self, x, *, op="mean"):
        return super().all_reduce(x, op=op)


class NoBarrier(Faulty):
    kind = "barrier"

    def wrong(self, call):
        return Done(torch.empty(0))


class WaitsForFirst(Faulty):
    """A barrier that any two ranks leave once the first rank has come."""

    kind = "barrier"

    def wrong(self, call):
        number, came = self.__dict__.get("number", 0), self._meeting.__dict__
        self.number = number + 1
        first = came.setdefault(f"barrier {number}", threading.Event())
        if self.rank == 0:
            first.set()
        first.wait(5)
        return Done(torch.empty(0))


MOVED = ("all_gather", "all_to_all", "broadcast")
KINDS = (*MOVED, "reduce_scatter", "all_reduce")
REDUCED = dict.fromkeys(KINDS[3:], check_reductions)
LEFT_ALONE = {**dict.fromkeys(MOVED, check_moves), "all_to_all": check_all_to_all, **REDUCED}  # who looks at x
FAULTS = [
    (LastSource, "broadcast", 3, check_moves, "from 0: not the values"),
    (GivesX, "broadcast", 3, check_moves, "lies in x's memory"),
    *((GivesX, kind, 1, check, "lies in x's memory") for kind, check in LEFT_ALONE.items()),
    *((NoOut, kind, 3, check_out, "out was not used") for kind in ("all_gather", "reduce_scatter")),
    *((NoStrides, kind, 3, check_views, "of a turned view") for kind in KINDS),
    *((OneBuffer, kind, 3, check_new, "after the next call") for kind in KINDS),
    *(
        (OneForAll, kind, 3, check_new, "by another rank|after the next call")
        for kind in ("all_gather", "broadcast", "all_reduce")
    ),
    *((InPlace, kind, 3, check, "x was changed") for kind, check in LEFT_ALONE.items()),
    (BeginsMaximum, "begin", 3, check_calls, "begun: "),
    (SumsToMean, "all_reduce", 3, check_calls, "by its name"),
    (NoBarrier, "barrier", 3, check_barrier, "rank . left after"),
    (WaitsForFirst, "barrier", 3, check_barrier, "rank [01] left after .*, rank 2 came"),
]


@pytest.mark.parametrize(("fault", "kind", "size", "check", "words"), FAULTS)
def test_a_planted_fault_is_seen_by_the_check_for_it(fault, kind, size, check, words):
    kept = thread_groups([range(size)], axis="shard")

    def work(rank):
        comm = fault(kept[0]._meeting, axis="shard", ranks=tuple(range(size)), rank=rank)
        comm.kind = kind
        try:
            check(comm, Quirks())
        except AssertionError:
            kept[0]._meeting._all_in.abort()  # or the others wait for this rank
            raise

    with pytest.raises(AssertionError, match=words):
        run_ranks(size, work)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", [check_moves, check_reductions, check_all_to_all, check_new])
def test_parts_of_one_allocation_are_new_tensors(kind, check):
    kept = thread_groups([range(2)], axis="shard", limit_s=5)

    def work(rank):
        comm = OneAllocation(kept[0]._meeting, axis="shard", ranks=(0, 1), rank=rank)
        comm.kind = kind
        check(comm, Quirks())

    run_ranks(2, work)


def test_memory_is_shared_where_bytes_are():
    """First to last byte, whatever the dtype and the strides; memory that two storages name counts too."""
    memory = torch.zeros(24)
    part = memory[4:8]
    for other, shared in (
        (memory[8:12], False),
        (memory[:4], False),
        (memory[7:9], True),
        (memory[:5], True),
        (memory[:4:3], False),
        (memory[:6:5], True),
        (memory[:12].view(3, 4).t()[:1], True),  # every fourth number: 0, 4, 8
        (memory[4:4], False),
        (memory.view(torch.uint8)[31:33], True),
        (memory.view(torch.uint8)[32:40], False),
        (torch.from_numpy(memory.numpy())[6:7], True),
        (torch.zeros(4), False),
    ):
        assert _share(part, other) == _share(other, part) == shared, other


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
