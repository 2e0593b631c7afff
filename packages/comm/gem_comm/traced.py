"""A debug mode: every call of every rank, recorded and compared, so that ranks which went different ways are named.

Two ways to use it:
    check_traces(trace, comm)        after a step: compares what all ranks have recorded
    TracedCollectives(..., eager=True)   before each call: the ranks of the group exchange a description of it (256
                                     bytes) and stop together when one differs, instead of hanging in it

Compared are kind, axis, dtype, trailing shape and reduction; all dims except in all_to_all, where row counts differ by
nature. A rank with no rows issues the same calls as the others. A call that fails or times out says which number it had
and what came before it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gem_comm.interface import Call, Collectives, CommError, Pending

_TEXT_BYTES = 256


@dataclass(kw_only=True)
class Trace:
    """Calls of this rank over all axes, in order: what all ranks must agree in, and the same with this rank's own
    row counts. Clear it after each step that was compared."""

    entries: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def record(self, call: Call, comm: Collectives) -> str:
        """Append a call; returns its comparable description."""
        text = describe(call, comm.axis)
        self.entries.append(text)
        rows = f" sends rows {call.send_rows}" if call.kind == "all_to_all" else ""
        self.details.append(f"call {len(self.entries) - 1}: {text}{rows}, group {comm.ranks}")
        return text

    def clear(self) -> None:
        """Forget all calls, at the end of a step that was compared."""
        self.entries.clear()
        self.details.clear()

    def tail(self, count: int = 5) -> str:
        """The latest calls, one a line."""
        return "\n  ".join(self.details[-count:])


def describe(call: Call, axis: str) -> str:
    """What all ranks of a group must agree in. Example: "all_gather over expert: (4, 8) float32"."""
    text = f"{call.kind} over {axis}"
    if call.x is not None:
        shape = list(call.x.shape)
        if call.kind == "all_to_all":
            shape[0] = -1
        text += f": ({', '.join('*' if n < 0 else str(n) for n in shape)}) {str(call.x.dtype).removeprefix('torch.')}"
    if call.kind in ("reduce_scatter", "all_reduce"):
        text += f" {call.op}"
    if call.kind == "broadcast":
        text += f" from position {call.source}"
    return text


class _TracedPending:
    def __init__(self, pending: Pending, trace: Trace, number: int) -> None:
        self._pending, self._trace, self._number = pending, trace, number

    def wait(self) -> Tensor:
        try:
            return self._pending.wait()
        except CommError as problem:
            raise CommError(f"call {self._number} failed: {problem}\n  {self._trace.tail()}") from problem


class TracedCollectives(Collectives):
    """`inner`, recorded in `trace`. eager: compare each call with the group's other ranks before it is made."""

    def __init__(self, inner: Collectives, trace: Trace, *, eager: bool = False) -> None:
        self.axis, self.ranks, self.rank, self.size = inner.axis, inner.ranks, inner.rank, inner.size
        self._inner, self._trace, self._eager = inner, trace, eager

    def launch(self, call: Call) -> Pending:
        text = self._trace.record(call, self)
        number = len(self._trace.entries) - 1
        if self._eager:
            device = torch.device("cpu") if call.x is None else call.x.device
            texts = exchange_text(self._inner, text, device=device)
            differing = [i for i, other in enumerate(texts) if other != texts[0]]
            if differing:
                lines = "\n  ".join(f"rank {self.ranks[i]}: {other}" for i, other in enumerate(texts))
                raise CommError(f"call {number} over {self.axis} differs between ranks:\n  {lines}")
        try:
            return _TracedPending(self._inner.launch(call), self._trace, number)
        except CommError as problem:
            raise CommError(f"call {number} failed: {problem}\n  {self._trace.tail()}") from problem


def exchange_text(comm: Collectives, text: str, *, device: torch.device) -> list[str]:
    """A short text of each rank (cut at 254 bytes), as one all_gather of fixed size."""
    encoded = text.encode()[: _TEXT_BYTES - 2]
    row = torch.zeros(1, _TEXT_BYTES, dtype=torch.uint8)
    row[0, 0] = len(encoded)
    row[0, 2 : 2 + len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else 0
    rows = comm.all_gather(row.to(device)).cpu()
    return [bytes(r[2 : 2 + int(r[0])].tolist()).decode(errors="replace") for r in rows]


def check_traces(trace: Trace, comm: Collectives, *, device: torch.device | str = "cpu") -> None:
    """Compare the recorded calls of all ranks of `comm` (the world's, untraced); a collective.

    Raises CommError on every rank, naming the first call in which a rank differs from the first rank, with both sides.
    """
    device = torch.device(device)
    counts = comm.all_gather(torch.tensor([len(trace.entries)], device=device)).tolist()
    longest = max(counts)
    mine = torch.zeros(1, longest, dtype=torch.int64)
    mine[0, : len(trace.entries)] = torch.tensor([_hash(text) for text in trace.entries], dtype=torch.int64)
    all_RN = comm.all_gather(mine.to(device)).cpu() if longest else mine
    differs_N = (all_RN != all_RN[0]).any(dim=0)
    if not bool(differs_N.any()):
        return
    number = int(differs_N.nonzero()[0])
    text = trace.entries[number] if number < len(trace.entries) else "(no such call)"
    texts = exchange_text(comm, text, device=device)
    other = next(i for i, found in enumerate(all_RN[:, number].tolist()) if found != int(all_RN[0, number]))
    raise CommError(
        f"ranks made different collectives; the first difference is call {number}: rank {comm.ranks[0]}: {texts[0]}; "
        f"rank {comm.ranks[other]}: {texts[other]} (calls in all: {counts})"
    )


def _hash(text: str) -> int:
    """63 bits, the same in every process (Python's own hash is salted); never 0, which pads."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 | 1
