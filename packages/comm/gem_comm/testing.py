"""The conformance suite that any implementation of Collectives can run, here or in another repository.

On every rank of a group:

    from gem_comm.testing import Quirks, check_rank
    check_rank(my_collectives, Quirks())
    check_codec(my_codec)                                           # in one process, for a Codec
    check_rank(wrap(collectives, codec=my_codec), Quirks(codec=my_codec))

Each rank knows what every rank puts in (`values` of its position), so the expected result is computed locally by the
reference and nothing else needs to travel. Data that is only moved must arrive bit for bit; sums are compared with
float64: an implementation may be off by 2 roundings of its dtype per rank that is added, at the size of the sum of the
magnitudes. With a codec the bound is the codec's own, for each number that was coded; `check_codec` bounds that bound.

Every call is also held against what the interface says of memory: x is left alone, and a result shares no memory with
x, with other results, or with what another rank of the same process received.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gem_comm import differentiable
from gem_comm.interface import Call, Codec, Collectives, CommError, Kind, Reduction
from gem_comm.quantized import from_rows, make_codec, to_rows
from gem_comm.reference import collect
from gem_comm.testing_codec import check_codec as check_codec
from gem_comm.testing_codec import values as values

_KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier")
_REDUCTIONS = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """What an implementation does not claim, as data; what it claims is tested in full.

    ValueError where it claims nothing, so that nothing would be tested: no kinds, or kinds without a dtype.

    device          where tensors live
    reduce_dtypes   dtypes whose sums are tested
    move_dtypes     dtypes that all_gather, all_to_all and broadcast move
    codec           the codec in use, or its name: results are then within its error, not exact
    kinds           collectives that are offered
    """

    device: str = "cpu"
    reduce_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.int64)
    move_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
    codec: str | Codec | None = None
    kinds: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier")

    def __post_init__(self) -> None:
        unknown = sorted(set(self.kinds) - set(_KINDS))
        if unknown or not self.kinds:
            raise ValueError(
                f"Quirks.kinds is {self.kinds}, expected some of {_KINDS}: without kinds nothing is tested"
            )
        offered = set(self.kinds) - {"barrier"}
        for name, kinds in (("reduce_dtypes", offered & set(_REDUCTIONS)), ("move_dtypes", offered - set(_REDUCTIONS))):
            if kinds and not getattr(self, name):
                raise ValueError(f"Quirks.{name} is empty, so {sorted(kinds)} would not be tested: name a dtype")


SHAPES = ((3,), (5, 4), (2, 3, 4), (0, 4), (0,), (1, 300), (600,))


def check_rank(comm: Collectives, quirks: Quirks) -> None:
    """All checks, on this rank; every rank of the group calls it. AssertionError says what differs."""
    for check in CHECKS:
        check(comm, quirks)


def _calls(comm: Collectives, call: Callable[[int], Call]) -> list[Call]:
    return [call(position) for position in range(comm.size)]


def _place(call: Call, device: str) -> Call:
    assert call.x is not None
    return _replace(call, call.x.to(device))


def _start(comm: Collectives, call: Call) -> Tensor:
    return comm.start(call).wait()


Layout = Callable[[Tensor], Tensor]
Run = Callable[[Collectives, Call], Tensor]


def _compare(
    what: str,
    comm: Collectives,
    quirks: Quirks,
    calls: list[Call],
    *,
    run: Run = _start,
    layout: Layout = lambda x: x,
    into: bool = False,
) -> None:
    """Run this rank's call and hold the result against the reference of all ranks' calls.

    run: how the call is made; layout: the same values in other memory; into: give `out`, and look there.
    """
    mine = _place(calls[comm.rank], quirks.device)
    assert mine.x is not None
    x, out = layout(mine.x), None
    given = x.clone()
    if into:
        out = torch.full_like(collect(calls)[comm.rank], 77).to(quirks.device)
    found = run(comm, replace(mine, x=x, out=out))
    assert torch.equal(x, given), f"{what}: x was changed"
    if out is None:
        assert not _share(found, x), f"{what}: the result lies in x's memory, expected a new tensor"
    else:
        assert found.data_ptr() == out.data_ptr(), f"{what}: out was not used"
    _hold(what, comm, quirks, calls, found if out is None else out)


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether bytes of one lie between the first and the last byte of the other. Parts of one allocation may not."""
    if a.device != b.device or not (a.numel() and b.numel()):
        return False
    (first_a, end_a), (first_b, end_b) = _span(a), _span(b)
    return first_a < end_b and first_b < end_a


def _span(x: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last."""
    numbers = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + numbers * x.element_size()


def _hold(what: str, comm: Collectives, quirks: Quirks, calls: list[Call], found: Tensor) -> None:
    """`found` is what this rank should have received."""
    expected = collect(calls)[comm.rank]
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
    bound = _bound(calls, comm, quirks)
    if bound is None:
        assert torch.equal(found.cpu(), expected), f"{what}: not the values that were sent"
        return
    error = (found.cpu().double() - collect([_wide(call) for call in calls])[comm.rank]).abs()
    worst = (error - bound).max() if error.numel() else torch.tensor(-1.0)
    assert worst <= 0, f"{what}: off by {float(error.max()):.3e}, {float(worst):.3e} more than allowed"


def _wide(call: Call) -> Call:
    assert call.x is not None
    return _replace(call, call.x.double())


def _bound(calls: list[Call], comm: Collectives, quirks: Quirks) -> Tensor | None:
    """Allowed error of each number on this rank; None: none."""
    first = calls[0]
    assert first.x is not None
    dtype = first.x.dtype
    summed = first.kind in ("reduce_scatter", "all_reduce") and first.op in ("sum", "mean")
    moved = first.kind in ("all_gather", "all_to_all")
    coded = quirks.codec is not None and (moved or (first.kind == "reduce_scatter" and summed))
    if not dtype.is_floating_point or not (summed or coded):
        return None
    exact = collect([_wide(call) for call in calls])[comm.rank]
    bound = exact.abs() * (torch.finfo(dtype).eps / 2)  # the result's own rounding
    if summed:
        rounding = torch.finfo(torch.float32 if coded else dtype).eps / 2
        magnitudes = collect([_replace(call, call.x.double().abs()) for call in calls if call.x is not None])
        bound = bound + magnitudes[comm.rank] * (2 * comm.size * rounding)
    if coded:
        bound = bound + collect([_replace(call, _coded_error(call, comm, quirks)) for call in calls])[comm.rank]
    return bound * (1 + 1e-6)


def _replace(call: Call, x: Tensor) -> Call:
    return replace(call, x=x)


def _coded_error(call: Call, comm: Collectives, quirks: Quirks) -> Tensor:
    assert quirks.codec is not None
    assert call.x is not None
    codec = make_codec(quirks.codec) if isinstance(quirks.codec, str) else quirks.codec
    if call.kind == "all_to_all":
        columns = call.x.flatten(1) if call.x.dim() > 1 else call.x[:, None]
        return codec.error_bound(columns).reshape(call.x.shape).double()
    parts = call.x.chunk(comm.size) if call.kind == "reduce_scatter" and call.x.shape[0] else [call.x]
    return torch.cat([from_rows(codec.error_bound(to_rows(p)), p.float()) for p in parts]).double()


# ------------------------------------------------------------------------------------------------ checks


def check_moves(comm: Collectives, quirks: Quirks) -> None:
    """all_gather and broadcast deliver every rank's values, in rank order; broadcast those of whichever is named."""
    for dtype in quirks.move_dtypes:
        for shape in SHAPES:
            if "all_gather" in quirks.kinds:
                calls = _calls(comm, lambda i: Call(kind="all_gather", x=values(i, shape, dtype)))  # noqa: B023
                _compare(f"all_gather {shape} {dtype}", comm, quirks, calls)
            for source in sorted({0, comm.size // 2, comm.size - 1}) if "broadcast" in quirks.kinds else ():
                calls = _calls(comm, lambda i: Call(kind="broadcast", x=values(i, shape, dtype), source=source))  # noqa: B023
                _compare(f"broadcast {shape} {dtype} from {source}", comm, quirks, calls)


def check_reductions(comm: Collectives, quirks: Quirks) -> None:
    """reduce_scatter and all_reduce, each operation."""
    for dtype in quirks.reduce_dtypes:
        for op in ("sum", "mean", "max", "min"):
            if op == "mean" and not dtype.is_floating_point:
                continue
            for rows, rest in ((3, (4,)), (0, (2,)), (1, ()), (2, (200,))):
                if "reduce_scatter" in quirks.kinds:
                    shape = (rows * comm.size, *rest)
                    calls = _calls(comm, lambda i: Call(kind="reduce_scatter", x=values(i, shape, dtype), op=op))  # noqa: B023
                    _compare(f"reduce_scatter {op} {shape} {dtype}", comm, quirks, calls)
                if "all_reduce" in quirks.kinds:
                    shape = (rows, *rest)
                    calls = _calls(comm, lambda i: Call(kind="all_reduce", x=values(i, shape, dtype), op=op))  # noqa: B023
                    _compare(f"all_reduce {op} {shape} {dtype}", comm, quirks, calls)


def check_all_to_all(comm: Collectives, quirks: Quirks) -> None:
    """Uneven counts, ranks that send nothing, ranks that receive nothing, nobody sending anything."""
    if "all_to_all" not in quirks.kinds:
        return
    n = comm.size
    plans = {
        "uneven": lambda i, j: (2 * i + j + 1) % 4,
        "rank 0 sends nothing": lambda i, j: 0 if i == 0 else 1 + j % 2,
        "rank 0 receives nothing": lambda i, j: 0 if j == 0 else 2,
        "empty": lambda i, j: 0,
    }
    for dtype in quirks.move_dtypes:
        for name, count in plans.items():
            for rest in ((), (3,)):

                def call(i: int, count=count, rest=rest, dtype=dtype) -> Call:  # type: ignore[no-untyped-def]
                    send = tuple(count(i, j) for j in range(n))
                    receive = tuple(count(j, i) for j in range(n))
                    x = values(i, (sum(send), *rest), dtype)
                    return Call(kind="all_to_all", x=x, send_rows=send, receive_rows=receive)

                _compare(f"all_to_all, {name}, {rest}, {dtype}", comm, quirks, _calls(comm, call))


def _one_of_each(
    comm: Collectives, quirks: Quirks, *, seed: int = 0, op: Reduction = "sum"
) -> Iterator[tuple[Kind, list[Call]]]:
    """A call of every kind with tensors that is offered, for all ranks, of its first dtype; broadcast from the middle.

    all_to_all is uneven: rank i sends (2 i + j + 1) % 4 rows to rank j.
    """
    n = comm.size

    def call(kind: Kind, i: int) -> Call:
        dtype = (quirks.reduce_dtypes if kind in _REDUCTIONS else quirks.move_dtypes)[0]
        send = tuple((2 * i + j + 1) % 4 for j in range(n))
        receive = tuple((2 * j + i + 1) % 4 for j in range(n))
        rows = {"reduce_scatter": 2 * n, "all_to_all": sum(send)}.get(kind, 2)
        x = values(i, (rows, 3), dtype, seed=seed)
        if kind == "all_to_all":
            return Call(kind=kind, x=x, send_rows=send, receive_rows=receive)
        if kind == "broadcast":
            return Call(kind=kind, x=x, source=n // 2)
        return Call(kind=kind, x=x, op=op) if kind in _REDUCTIONS else Call(kind=kind, x=x)

    for kind in _KINDS[:-1]:
        if kind in quirks.kinds:
            yield kind, [call(kind, i) for i in range(n)]


def check_out(comm: Collectives, quirks: Quirks) -> None:
    """`out` receives the result, also where x is the own part of it."""
    for op in ("sum", "max"):
        for kind, calls in _one_of_each(comm, quirks, op=op):
            if kind in ("all_gather", "reduce_scatter"):
                _compare(f"{kind} {op} into out", comm, quirks, calls, into=True)
    for kind, calls in _one_of_each(comm, quirks):
        if kind == "all_gather":
            x = calls[comm.rank].x
            assert x is not None
            out = torch.zeros(comm.size * 2, 3, dtype=x.dtype, device=quirks.device)
            mine = out[2 * comm.rank : 2 * comm.rank + 2]
            mine.copy_(x)
            found = comm.all_gather(mine, out=out)
            assert found.data_ptr() == out.data_ptr(), "all_gather into out around x: out was not used"
            _hold("all_gather into out around x", comm, quirks, calls, out)


def check_views(comm: Collectives, quirks: Quirks) -> None:
    """x may be a view with strides: turned, or every other column of something wider."""
    turned: Layout = lambda x: x.t().contiguous().t()  # noqa: E731
    for kind, calls in _one_of_each(comm, quirks):
        _compare(f"{kind} of a turned view", comm, quirks, calls, layout=turned)
        _compare(f"{kind} of every other column", comm, quirks, calls, layout=_spread)
        flat = [_replace(call, call.x[:, 0].contiguous()) for call in calls if call.x is not None]
        _compare(f"{kind} of every other number", comm, quirks, flat, layout=_spread)


def _spread(x: Tensor) -> Tensor:
    """The values of x, with other numbers between them."""
    return torch.stack([x, torch.full_like(x, 77)], dim=-1).flatten(-2)[..., ::2]


def check_new(comm: Collectives, quirks: Quirks) -> None:
    """Results are new tensors: two calls may be under way, and nobody's later call or result changes an earlier one."""
    for (kind, ones), (_, others) in zip(
        _one_of_each(comm, quirks), _one_of_each(comm, quirks, seed=1, op="sum"), strict=True
    ):
        mine = [_place(calls[comm.rank], quirks.device) for calls in (ones, others)]
        pending = [comm.start(call) for call in mine]
        found = [one.wait() for one in pending]
        found.append(_start(comm, mine[1]))
        for result, calls in zip(found, (ones, others, others), strict=True):
            _hold(f"{kind}, after the next call", comm, quirks, calls, result)
        for number, result in enumerate(found):
            assert not any(_share(result, other) for other in found[:number]), f"{kind}: two results share memory"
            result.fill_(comm.rank + 1)  # where ranks share memory, another's number comes
        _start(comm, mine[0])
        for result in found:
            assert bool((result == comm.rank + 1).all()), (
                f"{kind}: a result was changed by another rank or a later call"
            )


def check_barrier(comm: Collectives, quirks: Quirks) -> None:
    """Nobody leaves before the last has come: the first and the last rank in turn come BARRIER_DELAY_S late.

    Each rank reads its own clock only. It begins to count before a barrier that the late rank cannot leave without it,
    so a rank that is slow by chance counts more, never less.
    """
    if "barrier" not in quirks.kinds or comm.size == 1:
        return
    for late in (0, comm.size - 1):
        begin = time.monotonic()
        comm.barrier()
        if comm.rank == late:
            time.sleep(BARRIER_DELAY_S)
        comm.barrier()
        if torch.device(quirks.device).type == "cuda":
            torch.cuda.synchronize(quirks.device)  # there a wait may hold the stream, and not the host
        waited = time.monotonic() - begin
        assert waited >= BARRIER_DELAY_S, (
            f"barrier: rank {comm.rank} left after {waited:.3f} s, rank {late} came {BARRIER_DELAY_S} s late"
        )


BARRIER_DELAY_S = 0.03


def check_refusals(comm: Collectives, quirks: Quirks) -> None:
    """Wrong arguments are refused on this rank before anything travels, naming the axis."""
    x = torch.zeros(comm.size + 1, 2, device=quirks.device)
    wrong = [
        Call(kind="all_gather"),
        Call(kind="all_gather", x=torch.zeros((), device=quirks.device)),
        Call(kind="all_to_all", x=x, send_rows=(1,) * comm.size, receive_rows=(1,) * comm.size),
        Call(kind="all_reduce", x=torch.zeros(2, dtype=torch.int64, device=quirks.device), op="mean"),
        Call(kind="broadcast", x=x, source=comm.size),
        Call(kind="all_gather", x=x, out=x.new_zeros(1, 2)),
    ]
    if comm.size > 1:
        wrong.append(Call(kind="reduce_scatter", x=x))
    for call in wrong:
        try:
            comm.start(call)
        except CommError as problem:
            message = str(problem)
        else:
            raise AssertionError(f"not refused: {call}")
        assert comm.axis in message, f"{message} does not name the axis"
    if "barrier" in quirks.kinds:
        comm.barrier()


def check_gradients(comm: Collectives, quirks: Quirks) -> None:
    """The differentiable forms are transposes: <A x, y> summed over ranks equals <x, A^T y>, with uneven rows too."""
    if quirks.codec is not None or not {"all_gather", "reduce_scatter"} <= set(quirks.kinds):
        return
    rows = [(2 * i) % 3 for i in range(comm.size)]
    x = values(comm.rank, (rows[comm.rank], 3), torch.float64).to(quirks.device).requires_grad_()
    gathered = differentiable.all_gather_rows(x, comm, rows=rows)
    weight = values(comm.rank, (sum(rows), 3), torch.float64, seed=1).to(quirks.device)
    back = differentiable.reduce_scatter_rows(gathered * weight, comm, rows=rows)
    upper = values(comm.rank, (rows[comm.rank], 3), torch.float64, seed=2).to(quirks.device)
    (back * upper).sum().backward()
    weights = [values(i, (sum(rows), 3), torch.float64, seed=1) for i in range(comm.size)]
    own = slice(sum(rows[: comm.rank]), sum(rows[: comm.rank + 1]))
    expected = sum(weights)[own] * upper.cpu()  # type: ignore[index]
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), expected)


def check_calls(comm: Collectives, quirks: Quirks) -> None:
    """The named calls and `begin` do what `start` does for the call they stand for; the group says who is in it."""
    assert (len(comm.ranks), list(comm.ranks)) == (comm.size, sorted(set(comm.ranks))), f"ranks {comm.ranks}"
    assert 0 <= comm.rank < comm.size, f"rank {comm.rank} of {comm.size}"
    for op in ("max", "sum"):
        for kind, calls in _one_of_each(comm, quirks, op=op):
            _compare(f"{kind} {op}, by its name", comm, quirks, calls, run=_by_name)
    for kind, calls in _one_of_each(comm, quirks):
        plain = [Call(kind=kind, x=call.x) for call in calls]
        if kind != "all_to_all":  # which needs counts
            _compare(f"{kind}, begun", comm, quirks, plain, run=_begin)
            _compare(f"{kind}, by its name alone", comm, quirks, plain, run=_by_name)


def _begin(comm: Collectives, call: Call) -> Tensor:
    assert call.x is not None
    return comm.begin(call.kind, call.x).wait()


def _by_name(comm: Collectives, call: Call) -> Tensor:
    """The method named as the call, told no more than what differs from its defaults."""
    assert call.x is not None
    if call.kind == "all_to_all":
        return comm.all_to_all(call.x, send_rows=call.send_rows, receive_rows=call.receive_rows)
    options: dict[str, object] = {} if call.op == "sum" else {"op": call.op}
    if call.source:
        options["source"] = call.source
    method: Callable[..., Tensor] = getattr(comm, call.kind)
    return method(call.x, **options)


CHECKS = (
    check_moves,
    check_reductions,
    check_all_to_all,
    check_out,
    check_views,
    check_new,
    check_barrier,
    check_refusals,
    check_gradients,
    check_calls,
)
