"""From tensors to kernel launches: arguments grouped as the kernels take them, tiles listed, outputs allocated.

Plain functions without autograd; `triton_attention` makes operators of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor

from gem_attention.interface import AttentionSpec
from gem_attention.tile_lists import NOT_KEPT, lists_of
from gem_attention.triton_backward import dkv_kernel, dq_kernel, short_query_kernel
from gem_attention.triton_bias import Tables, tables_of, time_bounds, time_sides
from gem_attention.triton_config import Kernel, KernelSpec, Tiles, kernel_spec, pick_tiles
from gem_attention.triton_forward import forward_kernel
from gem_attention.triton_tables import empty_sums, programs_a_head, runs, summed, table_kernel
from gem_attention.triton_tiles import Sequences, tile_list

_TMA_ROWS = 2**30
_TOKENS = 64  # a program of time_sides works on
SHORT_QUERY_ROWS = (32, 64)  # what block_m of short_query_kernel can be


class Problem(NamedTuple):
    """Everything one call is about; tensors that a spec does not use are None. lists: see tile_lists."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    batch_size: int
    k_offsets: Tensor
    q_offsets: Tensor | None = None
    num_targets: Tensor | None = None
    num_context: Tensor | None = None
    kv_index: Tensor | None = None
    timestamps: Tensor | None = None
    position_table: Tensor | None = None
    time_table: Tensor | None = None
    divisor: Tensor | None = None
    lists: int = NOT_KEPT

    @property
    def out_rows(self) -> int:
        return self.batch_size * self.q.shape[0] if self.spec.query == "broadcast" else self.q.shape[0]

    def out_shape(self) -> tuple[int, ...]:
        """Packed: (rows of the output, H, E)."""
        return self.out_rows, self.q.shape[1], self.v.shape[2]


class Strides(NamedTuple):
    """(row, head) strides in elements of every tensor a kernel touches; (0, 0) where it has none."""

    q: tuple[int, int]
    k: tuple[int, int]
    v: tuple[int, int]
    out: tuple[int, int] = (0, 0)
    do: tuple[int, int] = (0, 0)
    dq: tuple[int, int] = (0, 0)
    dk: tuple[int, int] = (0, 0)
    dv: tuple[int, int] = (0, 0)


class Batch(NamedTuple):
    q_offsets: Tensor | None
    k_offsets: Tensor
    tiles: Tensor | None
    key_tiles: Tensor | None
    kv_index: Tensor | None
    kv_samples: Tensor | None
    time_bounds: Tensor | None
    divisor: Tensor | None
    seeds: int
    size: int
    chunks: int  # broadcast queries: copies of dq


class Numbers(NamedTuple):
    scale: float
    inverse_divisor: float
    gradient_scale: float
    window: int
    min_full: int
    group: int
    rows: int
    time_step: float


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET was set before they were imported)."""
    return not isinstance(forward_kernel, triton.runtime.JITFunction)


def _row_stride(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)


def rows_last(x: Tensor) -> Tensor:
    """x with its last dim contiguous, as the kernels need it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def tma_fits(*tensors: Tensor) -> bool:
    """Whether the copy engine can read these: 16-byte bases and strides, rows under 2^30, nothing empty."""
    for x in tensors:
        size = x.element_size()
        aligned = (
            x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and all(s * size % 16 == 0 and s > 0 for s in x.stride()[:-1])
        )
        if not aligned or x.shape[0] >= _TMA_ROWS or x.numel() == 0:
            return False
    return True


def compile_spec(p: Problem, tiles: Tiles) -> KernelSpec:
    return kernel_spec(
        p.spec,
        tiles,
        heads=p.q.shape[1],
        kv_heads=p.k.shape[1],
        dim=p.q.shape[2],
        v_dim=p.v.shape[2],
        shared_kv=p.kv_index is not None,
        fast_math=not interpreted() and p.q.dtype != torch.float32,
        precision="upcast" if interpreted() else "ieee" if p.q.dtype == torch.float32 else "tf32",
    )


def _tiles_for(p: Problem, kernel: Kernel, chosen: Tiles | None) -> Tiles:
    float32 = p.q.dtype == torch.float32
    return chosen or pick_tiles(kernel, p.spec, dim=p.q.shape[2], v_dim=p.v.shape[2], float32=float32)


def default_tiles(p: Problem, kernel: Kernel) -> Tiles:
    """The tiles a kernel gets when none are named."""
    return _tiles_for(p, kernel, None)


def _reader(x: Tensor, tiles: Tiles, rows: int, width: int) -> Any:
    """What a kernel reads x through: a descriptor that clips at a sequence's end, or x itself."""
    return create_ragged_descriptor(x, [rows, 1, width]) if tiles.tma else x


def run_numbers(p: Problem) -> Numbers:
    mask, bias = p.spec.mask, p.spec.bias
    inverse = 1.0 if p.spec.divisor == "per_token" else 1.0 / float(p.spec.divisor)
    return Numbers(
        scale=float(p.spec.scale),
        inverse_divisor=inverse,
        gradient_scale=float(p.spec.scale) * inverse,
        window=mask.window,
        min_full=mask.min_full_rows,
        group=mask.target_group_size,
        rows=-(-p.out_rows // 16) * 16,  # padded so that no batch compiles another variant
        time_step=bias.time.step if bias is not None and bias.time is not None else 1.0,
    )


def batch_arguments(
    p: Problem, *, tiles: Tensor | None = None, key_tiles: Tensor | None = None, chunks: int = 0
) -> Batch:
    spec = p.spec
    shared = p.kv_index is not None
    bounds = None
    if spec.bias is not None and spec.bias.time is not None:
        bounds = time_bounds(spec.bias.time, p.q.device)
    kv_samples = None
    if shared and key_tiles is not None:
        rows = torch.arange(p.k_offsets.shape[0], device=p.q.device)
        kv_samples = torch.searchsorted(p.kv_index, rows)
    return Batch(
        q_offsets=p.q_offsets,
        k_offsets=p.k_offsets,
        tiles=tiles,
        key_tiles=key_tiles,
        kv_index=p.kv_index,
        kv_samples=kv_samples,
        time_bounds=bounds,
        divisor=p.divisor,
        seeds=p.q.shape[0] if spec.query == "broadcast" else 0,
        size=p.batch_size,
        chunks=chunks,
    )


def _tables(p: Problem, c: KernelSpec, *, transposed: bool = False) -> tuple[Any, Tables]:
    """(descriptor of the position table or None, the other tables) for a kernel compiled for c."""
    times = None
    if c.time_bias and p.timestamps is not None:
        times = time_sides(p.timestamps, key_tiles(p, _TOKENS), c, _TOKENS)
    return tables_of(p.position_table, p.time_table, times, c, transposed=transposed)


def _sequences(p: Problem) -> Sequences:
    return Sequences(
        q_offsets=p.q_offsets,
        k_offsets=p.k_offsets,
        num_targets=p.num_targets if p.spec.mask.targets else None,
        num_context=p.num_context if p.spec.mask.context else None,
        kv_index=p.kv_index,
        seeds=p.q.shape[0] if p.q_offsets is None else 0,
    )


def _key_work(p: Problem) -> Tensor:
    """(B + 1,) offsets whose differences are the key lengths of the samples."""
    if p.kv_index is None:
        return p.k_offsets
    lengths = p.k_offsets.diff()[p.kv_index]
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def query_tiles(p: Problem, block: int, *, paired: bool = False) -> Tensor:
    """Tiles of the output's rows, ordered by the keys they read."""

    def make() -> Tensor:
        rows, offsets = p.q.shape[0], p.q_offsets
        if offsets is None:  # every sample has the same seeds
            offsets, rows = torch.arange(p.batch_size + 1, device=p.q.device) * rows, p.out_rows
        return tile_list(
            _sequences(p), rows_offsets=offsets, work_offsets=_key_work(p), rows=rows, block=block, paired=paired
        )

    return _kept(p, ("q", block, paired), make)


def key_tiles(p: Problem, block: int, *, paired: bool = False) -> Tensor:
    """Tiles of k, ordered by the rows that read them (by length where k rows are shared)."""

    def make() -> Tensor:
        return tile_list(
            _sequences(p),
            rows_offsets=p.k_offsets,
            work_offsets=p.q_offsets if p.q_offsets is not None and p.kv_index is None else p.k_offsets,
            rows=p.k.shape[0],
            block=block,
            keys=True,
            paired=paired,
        )

    return _kept(p, ("k", block, paired), make)


def _kept(p: Problem, kind: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
    """The list of that kind: the layout's own, or made now."""
    lists = lists_of(p.lists)
    if lists is None:
        return make()
    mask, seeds = p.spec.mask, p.q.shape[0] if p.q_offsets is None else 0
    key = (*kind, mask.targets, mask.context, seeds)
    found = lists.get(key)
    if found is None:
        found = lists[key] = make()
    return found


def forward(p: Problem, tiles: Tiles | None = None) -> tuple[Tensor, Tensor]:
    """(out (rows, H, E), lse (H, rows padded) float32; lse is empty for pointwise activations)."""
    q, k, v = rows_last(p.q), rows_last(p.k), rows_last(p.v)
    p = p._replace(q=q, k=k, v=v)
    out = torch.empty(p.out_shape(), dtype=q.dtype, device=q.device)
    numbers = run_numbers(p)
    lse_shape = (q.shape[1], numbers.rows) if p.spec.activation == "softmax" else (0,)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("inf"))
    chosen = _tiles_for(p, "forward", tiles)
    chosen = _without_tma(chosen, q, k, v)
    c = compile_spec(p, chosen)
    listed = query_tiles(p, c.block_m)
    forward_kernel[(listed.shape[0] * c.heads,)](
        _reader(q, chosen, c.block_m, c.block_d),
        _reader(k, chosen, c.block_n, c.block_d),
        _reader(v, chosen, c.block_n, c.block_e),
        out,
        lse,
        Strides(q=_row_stride(q), k=_row_stride(k), v=_row_stride(v), out=_row_stride(out)),
        batch_arguments(p, tiles=listed),
        numbers,
        *_tables(p, c),
        C=c,
        **chosen.launch,
    )
    return out, lse


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    position: Tensor | None
    time: Tensor | None


def backward(
    p: Problem,
    do: Tensor,
    out: Tensor | None,
    lse: Tensor,
    *,
    short_queries: int = 0,
    dq_tiles: Tiles | None = None,
    dkv_tiles: Tiles | None = None,
) -> Gradients:
    """Gradients of every differentiable input. do: (rows, H, E). out and lse: the forward's, used by softmax only.

    short_queries: 32 or 64 promises that no sample has more rows of q; 0 promises nothing.
    """
    q, k, v, do = rows_last(p.q), rows_last(p.k), rows_last(p.v), rows_last(do)
    p = p._replace(q=q, k=k, v=v)
    grads = empty_gradients(p)
    if do.numel() == 0 or k.shape[0] == 0:
        for grad in (grads.dq, grads.dk, grads.dv):
            grad.zero_()
        position, time = (
            None if t is None else torch.zeros(t.shape, dtype=torch.float32, device=t.device)
            for t in (p.position_table, p.time_table)
        )
        return grads._replace(position=position, time=time)
    if short_queries and takes_short_queries(p):
        return short_query_backward(p, do, grads, short_queries, dkv_tiles)
    # rows of k that no sample reads get zero by the kernel itself: it visits every key tile
    delta = torch.empty_like(lse)
    grads = run_dq(p, do, out, lse, delta, grads=grads, tiles=_tiles_for(p, "dq", dq_tiles))
    run_dkv(p, do, lse, delta, grads, _tiles_for(p, "dkv", dkv_tiles))
    if p.spec.bias is not None:
        grads = run_tables(p, do, lse, delta, grads=grads, tiles=_tiles_for(p, "tables", None))
    return grads


def empty_gradients(p: Problem) -> Gradients:
    """Room for dq, dk and dv; the tables' gradients come from run_tables."""
    return Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (p.q, p.k, p.v)), None, None)


def _without_tma(tiles: Tiles, *tensors: Tensor) -> Tiles:
    return replace(tiles, tma=False) if tiles.tma and not tma_fits(*tensors) else tiles


def run_dq(
    p: Problem, do: Tensor, out: Tensor | None, lse: Tensor, delta: Tensor, *, grads: Gradients, tiles: Tiles
) -> Gradients:
    """grads with dq; delta is filled for softmax."""
    tiles = _without_tma(tiles, p.q, p.k, p.v, do)
    c = compile_spec(p, tiles)
    if p.spec.query == "broadcast":
        rows_tiles = -(-p.q.shape[0] // c.block_m)
        chunks = min(p.batch_size, max(1, 264 // (rows_tiles * c.heads)))
        dq = torch.empty(chunks, *p.q.shape, dtype=torch.float32, device=p.q.device)
        batch, programs = batch_arguments(p, chunks=chunks), chunks * rows_tiles
        stride = (dq.stride(1), dq.stride(2))
    else:
        dq = grads.dq
        listed = query_tiles(p, c.block_m)
        programs, stride = listed.shape[0], _row_stride(dq)
        batch = batch_arguments(p, tiles=listed)
    dq_kernel[(programs * c.heads,)](
        _reader(p.q, tiles, c.block_m, c.block_d),
        _reader(p.k, tiles, c.block_n, c.block_d),
        _reader(p.v, tiles, c.block_n, c.block_e),
        out if p.spec.activation == "softmax" else None,
        _reader(do, tiles, c.block_m, c.block_e),
        lse,
        delta,
        dq,
        Strides(
            q=_row_stride(p.q),
            k=_row_stride(p.k),
            v=_row_stride(p.v),
            out=_row_stride(out) if p.spec.activation == "softmax" and out is not None else (0, 0),
            do=_row_stride(do),
            dq=stride,
        ),
        batch,
        run_numbers(p),
        *_tables(p, c),
        C=c,
        **tiles.launch,
    )
    return grads._replace(dq=dq.sum(0).to(p.q.dtype)) if p.spec.query == "broadcast" else grads


def run_tables(p: Problem, do: Tensor, lse: Tensor, delta: Tensor, *, grads: Gradients, tiles: Tiles) -> Gradients:
    """grads with the gradients of the bias tables; softmax: after run_dq, which fills delta."""
    tiles = _without_tma(tiles, p.q, p.k, p.v, do)
    c = compile_spec(p, tiles)
    # with square tiles a causal mask without context leaves nothing right of the main diagonal
    below = c.query == "self" and c.causal and not c.context
    listed = runs(query_tiles(p, c.block_m), None if below else key_tiles(p, c.block_n))
    each = programs_a_head(listed.shape[0], c.heads, p.q.device, per_multiprocessor=tiles.programs)
    programs = each * c.heads
    sums = empty_sums(p.position_table, p.time_table, programs, c)
    numbers = run_numbers(p)
    table_kernel[(programs,)](
        _reader(p.q, tiles, c.block_m, c.block_d),
        _reader(p.k, tiles, c.block_n, c.block_d),
        _reader(p.v, tiles, c.block_n, c.block_e),
        _reader(do, tiles, c.block_m, c.block_e),
        lse,
        delta,
        Strides(q=_row_stride(p.q), k=_row_stride(p.k), v=_row_stride(p.v), do=_row_stride(do)),
        batch_arguments(p, tiles=listed),
        numbers,
        *_tables(p, c),
        sums,
        listed.shape[0],
        C=c,
        **tiles.launch,
    )
    factor = numbers.gradient_scale if c.bias_inside else numbers.inverse_divisor
    position, time = summed(sums, p.position_table, p.time_table, c.heads, factor)
    return grads._replace(position=position, time=time)


def run_dkv(p: Problem, do: Tensor, lse: Tensor, delta: Tensor, grads: Gradients, tiles: Tiles) -> None:
    tiles = _without_tma(tiles, p.q, p.k, p.v, do)
    c = compile_spec(p, tiles)
    listed = key_tiles(p, c.block_n)
    dkv_kernel[(listed.shape[0] * c.kv_heads,)](
        _reader(p.q, tiles, c.block_m, c.block_d),
        _reader(p.k, tiles, c.block_n, c.block_d),
        _reader(p.v, tiles, c.block_n, c.block_e),
        _reader(do, tiles, c.block_m, c.block_e),
        lse,
        delta,
        grads.dk,
        grads.dv,
        Strides(
            q=_row_stride(p.q),
            k=_row_stride(p.k),
            v=_row_stride(p.v),
            do=_row_stride(do),
            dk=_row_stride(grads.dk),
            dv=_row_stride(grads.dv),
        ),
        batch_arguments(p, key_tiles=listed),
        run_numbers(p),
        *_tables(p, c, transposed=True),
        C=c,
        **tiles.launch,
    )


def takes_short_queries(p: Problem) -> bool:
    """Whether `short_query_kernel` covers this problem (the caller knows that all samples are short enough)."""
    spec = p.spec
    plain = spec.activation != "softmax" and spec.mask == type(spec.mask)() and spec.bias is None
    return (
        plain
        and p.kv_index is None
        and p.q.shape[1] == p.k.shape[1]
        and max(p.q.shape[2], p.v.shape[2]) <= 128
        and p.q.dtype != torch.float32
    )


def short_query_backward(p: Problem, do: Tensor, grads: Gradients, rows: int, tiles: Tiles | None = None) -> Gradients:
    """dq, dk and dv in one kernel; no sample has more than `rows` rows of q."""
    tiles = _without_tma(tiles or replace(_tiles_for(p, "short", None), block_m=rows), p.k, p.v)
    c = compile_spec(p, tiles)
    shared = p.spec.query == "broadcast"
    dq = torch.empty(p.out_rows, *p.q.shape[1:], dtype=torch.float32, device=p.q.device) if shared else grads.dq
    short_query_kernel[(p.batch_size * c.heads,)](
        p.q,
        _reader(p.k, tiles, c.block_n, c.block_d),
        _reader(p.v, tiles, c.block_n, c.block_e),
        do,
        dq,
        grads.dk,
        grads.dv,
        Strides(
            q=_row_stride(p.q),
            k=_row_stride(p.k),
            v=_row_stride(p.v),
            do=_row_stride(do),
            dq=_row_stride(dq),
            dk=_row_stride(grads.dk),
            dv=_row_stride(grads.dv),
        ),
        batch_arguments(p),
        run_numbers(p),
        _tables(p, c)[1],
        C=c,
        **tiles.launch,
    )
    if shared:
        return grads._replace(dq=dq.view(p.batch_size, *p.q.shape).sum(0).to(p.q.dtype))
    return grads
