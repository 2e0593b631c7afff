"""The two calls of this package: `make_layout` once a batch, `attention` once a layer.

Implementations are modules (<name>.py or <name>_attention.py) with two functions, imported only when asked for:
    attention(q, k, v, *, spec, layout, position_table, time_table, divisor)   as interface.Attention
    why_not(q, k, v, *, spec, layout) -> str | None                            why it cannot run here, or None
Checks happen here, once, so that all of them refuse the same input with the same words.
"""

from __future__ import annotations

import logging
from types import ModuleType

import torch
from torch import Tensor

from gem_attention.interface import AttentionSpec, CannotRunError, Impl, Layout
from gem_attention.validation import check_call, check_layout, check_layout_shapes

IMPLEMENTATIONS = ("reference", "eager", "triton", "gluon")
_AUTO_ORDER = {"cuda": ("gluon", "triton", "eager"), "cpu": ("eager",), "meta": ("eager",)}
_log = logging.getLogger(__name__)
_announced: set[tuple[str, str]] = set()


def make_layout(
    *,
    q_offsets: Tensor | None = None,
    k_offsets: Tensor | None = None,
    kv_index: Tensor | None = None,
    num_targets: Tensor | None = None,
    num_context: Tensor | None = None,
    timestamps: Tensor | None = None,
    tail: bool = False,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    total_q: int | None = None,
    total_k: int | None = None,
    check_values: bool = True,
) -> Layout:
    """Describe one batch, check it, and share the result between layers.

    q_offsets alone: self attention. Both: cross, or with tail=True the last rows of each key sequence. k_offsets alone:
    broadcast queries. See `Layout` for shapes.
    Lengths and totals that are not given are read from the offsets, which waits for the device; so does check_values.
    A trainer whose loader has checked its batches passes all host numbers and check_values=False: then nothing waits,
    and wrong offsets are undefined behaviour.

    Example: lengths 2, 0, 3 and one target in the last sample:
        make_layout(q_offsets=tensor([0, 2, 2, 5]), num_targets=tensor([0, 0, 1]))
    """
    if k_offsets is None:
        if q_offsets is None:
            raise ValueError("make_layout needs q_offsets (self), k_offsets (broadcast queries), or both (cross, tail)")
        k_offsets = q_offsets
        max_k_len = max_q_len if max_k_len is None else max_k_len
        total_k = total_q if total_k is None else total_k
    if kv_index is not None:
        batch_size = kv_index.shape[0]
    else:
        batch_size = (k_offsets if q_offsets is None else q_offsets).shape[0] - 1
    total_k, max_k_len = _host_numbers(k_offsets, total_k, max_k_len)
    if q_offsets is None:
        total_q, max_q_len = 0, 0
    elif q_offsets is k_offsets:
        total_q, max_q_len = total_k, max_k_len
    else:
        total_q, max_q_len = _host_numbers(q_offsets, total_q, max_q_len)
    layout = Layout(
        k_offsets=k_offsets,
        batch_size=batch_size,
        total_k=total_k,
        max_k_len=max_k_len,
        q_offsets=q_offsets,
        total_q=total_q,
        max_q_len=max_q_len,
        tail=tail,
        num_targets=num_targets,
        num_context=num_context,
        kv_index=kv_index,
        timestamps=timestamps,
    )
    if check_values:
        check_layout(layout)
    else:
        check_layout_shapes(layout)
    return layout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    layout: Layout,
    position_table: Tensor | None = None,
    time_table: Tensor | None = None,
    divisor: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attention over jagged sequences; see interface.Attention for shapes and interface for the formula.

    impl "reference" is the definition (a loop over samples), "eager" batched PyTorch for any device, "triton" and
    "gluon" GPU kernels; "auto" takes the fastest that can run and logs once which. ValueError for bad input, the same
    for each impl; CannotRunError, with the reason, when the named implementation cannot run here.

    Example: two sequences of 3 and 2 tokens, one head, causal HSTU:
        spec = AttentionSpec(activation="silu", scale=1.0, divisor=3.0, mask=MaskSpec(causal=True))
        out = attention(q, k, v, spec=spec, layout=make_layout(q_offsets=tensor([0, 3, 5])), impl="eager")
    Row 0 is silu(<q_0, k_0>) / 3 * v_0; row 3, the first of the second sequence, silu(<q_3, k_3>) / 3 * v_3.
    """
    check_call(q, k, v, spec=spec, layout=layout, position_table=position_table, time_table=time_table, divisor=divisor)
    name, module = _choose(impl, q, k, v, spec, layout)
    if name == "eager" and torch.compiler.is_compiling():
        from gem_attention import eager_op

        module = eager_op
    out: Tensor = module.attention(
        q, k, v, spec=spec, layout=layout, position_table=position_table, time_table=time_table, divisor=divisor
    )
    return out


def _choose(impl: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, layout: Layout) -> tuple[str, ModuleType]:
    if impl == "auto":
        reasons: list[str] = []
        for name in _AUTO_ORDER.get(q.device.type, ("eager",)):
            module, reason = _load(name, q, k, v, spec, layout)
            if module is not None:
                _announce(name, q.device.type, reasons)
                return name, module
            reasons.append(f"{name}: {reason}")
        raise CannotRunError("no implementation can run here: " + "; ".join(reasons))
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: expected one of {', '.join(map(repr, [*IMPLEMENTATIONS, 'auto']))}")
    module, reason = _load(impl, q, k, v, spec, layout)
    if module is None:
        raise CannotRunError(f"impl={impl!r} cannot run here: {reason}")
    return impl, module


def _load(
    name: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, layout: Layout
) -> tuple[ModuleType | None, str | None]:
    try:
        module = _import(name)
    except ImportError as error:
        return None, f"its module does not import ({error})"
    reason: str | None = module.why_not(q, k, v, spec=spec, layout=layout)
    return (module, None) if reason is None else (None, reason)


def _import(name: str) -> ModuleType:
    # Import statements, not importlib: torch.compile traces through them.
    if name == "reference":
        from gem_attention import reference

        return reference
    if name == "eager":
        from gem_attention import eager

        return eager
    if name == "triton":
        from gem_attention import triton_attention

        return triton_attention
    from gem_attention import gluon_attention  # type: ignore[attr-defined, unused-ignore]

    gluon: ModuleType = gluon_attention
    return gluon


def _announce(name: str, device: str, reasons: list[str]) -> None:
    if torch.compiler.is_compiling():  # logging would break the graph; the choice is the same as outside
        return
    if (name, device) not in _announced:
        _announced.add((name, device))
        _log.info("attention on %s: impl=%r%s", device, name, f" ({'; '.join(reasons)})" if reasons else "")


def _host_numbers(offsets: Tensor, total: int | None, max_len: int | None) -> tuple[int, int]:
    """(rows, longest row) of offsets, reading values only where a number is missing."""
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"offsets: expected (samples + 1,), got shape {tuple(offsets.shape)}")
    if total is None:
        total = int(offsets[-1].item())
    if max_len is None:
        max_len = int(offsets.diff().max().item()) if offsets.shape[0] > 1 else 0
    return total, max_len
