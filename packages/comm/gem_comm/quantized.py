"""Coded payloads around any collectives: fewer bytes on the wire, sums in float32.

    all_gather      each rank codes its part once; all decode
    reduce_scatter  each rank codes the n parts, an all_to_all moves them, and the receiver adds n decoded parts in
                    float32 in rank order. Every number is rounded once, however many ranks add up: a coded ring would
                    round n times
    all_to_all      rows are coded one by one

Only floating-point payloads are coded, and only in these three (and in reduce_scatter only for sum and mean): ids and
counts must be exact, and all_reduce is for small things here. Those travel unchanged. A tensor of one dim is cut into
rows of `BLOCK` numbers, the last of each rank's part filled with zeros; others are coded by their first dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_comm.codecs import Bf16Codec, Fp8Codec, Int8Codec
from gem_comm.interface import Call, Codec, Collectives, CommError, Pending
from gem_comm.validation import did_you_mean

BLOCK = 256
CODECS: dict[str, Callable[[], Codec]] = {"bf16": Bf16Codec, "fp8": Fp8Codec, "int8": Int8Codec}


def make_codec(name: str) -> Codec:
    """The codec "bf16", "fp8" or "int8"."""
    if name not in CODECS:
        raise CommError(f"unknown codec {name!r}; {did_you_mean(name, CODECS)}")
    return CODECS[name]()


class _Decoding:
    def __init__(self, pending: Pending, decode: Callable[[Tensor], Tensor]) -> None:
        self._pending, self._decode = pending, decode

    def wait(self) -> Tensor:
        return self._decode(self._pending.wait())


class QuantizedCollectives(Collectives):
    """`inner` with payloads coded by `codec`."""

    def __init__(self, inner: Collectives, codec: Codec) -> None:
        self.axis, self.ranks, self.rank, self.size = inner.axis, inner.ranks, inner.rank, inner.size
        self._inner, self.codec = inner, codec

    def launch(self, call: Call) -> Pending:
        x = call.x
        coded = call.kind in ("all_gather", "all_to_all") or (
            call.kind == "reduce_scatter" and call.op in ("sum", "mean")
        )
        if x is None or not coded or not x.dtype.is_floating_point or x.dtype.itemsize == 1:
            return self._inner.launch(call)
        if call.kind == "all_gather":
            return self._all_gather(call, x)
        return self._reduce_scatter(call, x) if call.kind == "reduce_scatter" else self._all_to_all(call, x)

    def _all_gather(self, call: Call, x: Tensor) -> Pending:
        rows = to_rows(x)
        pending = self._inner.launch(Call(kind="all_gather", x=self.codec.encode(rows)))

        def decode(payload: Tensor) -> Tensor:
            parts = self.codec.decode(payload, rows.shape[1]).chunk(self.size) if x.numel() else [x] * self.size
            return _give(call, [from_rows(part, x) for part in parts])

        return _Decoding(pending, decode)

    def _reduce_scatter(self, call: Call, x: Tensor) -> Pending:
        parts = x.chunk(self.size) if x.shape[0] else [x] * self.size
        rows = [to_rows(part) for part in parts]
        count, columns = rows[0].shape
        payload = self.codec.encode(torch.cat(rows))
        each = (count,) * self.size
        pending = self._inner.launch(Call(kind="all_to_all", x=payload, send_rows=each, receive_rows=each))

        def decode(payload: Tensor) -> Tensor:
            if not x.numel():
                return _give(call, [parts[0].clone()])
            total = self.codec.decode(payload, columns).view(self.size, count, columns).sum(0)
            return _give(call, [from_rows(total / self.size if call.op == "mean" else total, parts[0])])

        return _Decoding(pending, decode)

    def _all_to_all(self, call: Call, x: Tensor) -> Pending:
        if x.dim() == 1:
            x = x[:, None]
        payload = self.codec.encode(x.flatten(1))
        columns = x.shape[1:].numel()
        pending = self._inner.launch(
            Call(kind="all_to_all", x=payload, send_rows=call.send_rows, receive_rows=call.receive_rows)
        )
        assert call.x is not None
        shape, dtype = call.x.shape[1:], call.x.dtype
        return _Decoding(
            pending, lambda payload: self.codec.decode(payload, columns).reshape(-1, *shape).to(dtype).contiguous()
        )


def to_rows(x: Tensor) -> Tensor:
    """(r, ...) as (r, columns); a single dim as blocks of BLOCK, filled up with zeros."""
    if x.dim() > 1:
        return x.flatten(1)
    return F.pad(x, (0, -x.shape[0] % BLOCK)).view(-1, BLOCK)


def from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of `to_rows` for a tensor shaped as `like`."""
    flat = rows.reshape(-1)[: like.numel()]
    return flat.view(like.shape).to(like.dtype)


def _give(call: Call, parts: list[Tensor]) -> Tensor:
    result = torch.cat(parts) if len(parts) > 1 else parts[0]
    if call.out is None:
        return result.contiguous()
    return call.out.copy_(result)
