"""The conformance suite that any implementation of Collectives can run, here or in another repository.

On every rank of a group:

    from gem_comm.testing import Quirks, check_rank
    check_rank(my_collectives, Quirks())
    check_codec(my_codec)                                           # in one process, for a Codec
    check_rank(wrap(collectives, codec=my_codec), Quirks(codec=my_codec))

Each rank knows what every rank puts in (`values` of its position), so the expected result is computed locally by the
reference and nothing else needs to travel. Data that is only moved must arrive bit for bit; sums are compared with
float64: an implementation may be off by 2 roundings of its dtype per rank that is added, at the size of the sum of the
magnitudes. With a codec the bound is the codec's own, for each number that was coded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gem_comm import differentiable
from gem_comm.interface import Call, Codec, Collectives, CommError, Kind
from gem_comm.quantized import from_rows, make_codec, to_rows
from gem_comm.reference import collect


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """What an implementation does not claim, as data; what it claims is tested in full.

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


SHAPES = ((3,), (5, 4), (2, 3, 4), (0, 4), (0,), (1, 300), (600,))


def values(position: int, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """What the rank at `position` puts in: known to all."""
    generator = torch.Generator().manual_seed(1000 * seed + position)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3 ** (position % 4)).to(dtype)


def check_rank(comm: Collectives, quirks: Quirks) -> None:
    """All checks, on this rank; every rank of the group calls it. AssertionError says what differs."""
    for check in CHECKS:
        check(comm, quirks)


def _calls(comm: Collectives, call: Callable[[int], Call]) -> list[Call]:
    return [call(position) for position in range(comm.size)]


def _place(call: Call, device: str) -> Call:
    assert call.x is not None
    return _replace(call, call.x.to(device))


def _compare(what: str, comm: Collectives, quirks: Quirks, calls: list[Call]) -> None:
    """Run this rank's call and hold the result against the reference of all ranks' calls."""
    mine = _place(calls[comm.rank], quirks.device)
    assert mine.x is not None
    given = mine.x.clone()
    found = comm.start(mine).wait()
    assert torch.equal(mine.x, given), f"{what}: x was changed"
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
    """all_gather and broadcast deliver every rank's values, in rank order."""
    for dtype in quirks.move_dtypes:
        for shape in SHAPES:
            if "all_gather" in quirks.kinds:
                calls = _calls(comm, lambda i: Call(kind="all_gather", x=values(i, shape, dtype)))  # noqa: B023
                _compare(f"all_gather {shape} {dtype}", comm, quirks, calls)
            if "broadcast" in quirks.kinds:
                last = comm.size - 1
                calls = _calls(comm, lambda i: Call(kind="broadcast", x=values(i, shape, dtype), source=last))  # noqa: B023
                _compare(f"broadcast {shape} {dtype}", comm, quirks, calls)


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
        "uneven": lambda i, j: (2 * i + j) % 4,
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


def check_out(comm: Collectives, quirks: Quirks) -> None:
    """`out` receives the result, also where x is the own part of it; x may be a view with strides."""
    if "all_gather" in quirks.kinds and quirks.codec is None:
        out = torch.zeros(comm.size * 2, 3, device=quirks.device)
        mine = out[2 * comm.rank : 2 * comm.rank + 2]
        mine.copy_(values(comm.rank, (2, 3), torch.float32))
        found = comm.all_gather(mine, out=out)
        assert found.data_ptr() == out.data_ptr(), "out was not used"
        expected = torch.cat([values(i, (2, 3), torch.float32) for i in range(comm.size)])
        assert torch.equal(out.cpu(), expected), "all_gather into out"
        assert torch.equal(comm.begin("all_gather", mine).wait().cpu(), expected), "all_gather, begun"
        strided = values(comm.rank, (3, 2), torch.float32).to(quirks.device).t()
        expected = torch.cat([values(i, (3, 2), torch.float32).t() for i in range(comm.size)])
        assert torch.equal(comm.all_gather(strided).cpu(), expected), "all_gather of a view with strides"


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
    """The named calls give what `start` gives for the call they stand for; the group says who is in it."""
    assert (len(comm.ranks), list(comm.ranks)) == (comm.size, sorted(set(comm.ranks))), f"ranks {comm.ranks}"
    assert 0 <= comm.rank < comm.size, f"rank {comm.rank} of {comm.size}"
    n, x = comm.size, values(comm.rank, (2 * comm.size, 3), torch.float32).to(quirks.device)
    each = (2,) * n
    named: dict[Kind, Callable[[], Tensor]] = {
        "reduce_scatter": lambda: comm.reduce_scatter(x, op="max"),
        "all_reduce": lambda: comm.all_reduce(x, op="max"),
        "all_to_all": lambda: comm.all_to_all(x, send_rows=each, receive_rows=each),
        "broadcast": lambda: comm.broadcast(x, source=n - 1),
    }
    whole = {
        "reduce_scatter": Call(kind="reduce_scatter", x=x, op="max"),
        "all_reduce": Call(kind="all_reduce", x=x, op="max"),
        "all_to_all": Call(kind="all_to_all", x=x, send_rows=each, receive_rows=each),
        "broadcast": Call(kind="broadcast", x=x, source=n - 1),
    }
    for kind, call in named.items():
        if kind in quirks.kinds:
            assert torch.equal(call(), comm.start(whole[kind]).wait()), f"{kind}, by its name"


def check_codec(codec: Codec, *, device: str = "cpu") -> None:
    """A codec in one process: rows of bytes, each alone, within the bound it states; what is not finite stays so."""
    assert isinstance(codec.name, str)
    assert codec.name, "a codec has a name"
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for rows, columns in ((5, 4), (3, 300), (1, 1), (0, 7)):
            what = f"{codec.name} of {rows} x {columns} {dtype}"
            x_RD = values(rows, (rows, columns), dtype).to(device)
            payload_RP = codec.encode(x_RD)
            expected = (torch.uint8, (rows, codec.row_bytes(columns)))
            assert (payload_RP.dtype, tuple(payload_RP.shape)) == expected, (
                f"{what}: {payload_RP.shape}, row_bytes says {expected}"
            )
            found_RD, bound_RD = codec.decode(payload_RP, columns), codec.error_bound(x_RD)
            assert found_RD.dtype == bound_RD.dtype == torch.float32, f"{what}: {found_RD.dtype}, {bound_RD.dtype}"
            assert found_RD.shape == bound_RD.shape == x_RD.shape, f"{what}: {found_RD.shape}, {bound_RD.shape}"
            error_RD = (found_RD.double() - x_RD.double()).abs()
            assert (error_RD <= bound_RD.double() * (1 + 1e-6)).all(), f"{what}: error {error_RD} over {bound_RD}"
            for row in range(rows):
                assert torch.equal(codec.encode(x_RD[row : row + 1]), payload_RP[row : row + 1]), (
                    f"{what}: row {row} alone"
                )
    for bad in (float("nan"), float("inf"), -float("inf")):
        x_RD = values(1, (2, 6), torch.float32).to(device)
        clean_RD = codec.decode(codec.encode(x_RD), 6)
        x_RD[0, 3] = bad
        found_RD = codec.decode(codec.encode(x_RD), 6)
        assert torch.equal(found_RD[1], clean_RD[1]), f"{codec.name}: {bad} in a row changed the next one"
        came = float(found_RD[0, 3])
        assert came != came or came == bad, f"{codec.name}: {bad} came as {came}"


CHECKS = (check_moves, check_reductions, check_all_to_all, check_out, check_refusals, check_gradients, check_calls)
