"""From tensors to launches of the block's kernels: compile-time choices, tiles, outputs. Without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gem_attention import block_kernels
from gem_attention.block_gate import gate_gradient_kernel, gate_kernel
from gem_attention.interface import GateSpec, ProjectionSpec

MAX_WIDTH = 8192  # of a norm's row: whole rows are held in registers
_GATE_ELEMENTS = 4096  # of a program


@dataclass(frozen=True, kw_only=True)
class BlockTiles:
    """Tile sizes and launch options of a product. programs: per multiprocessor, 0 for one for each tile.

    beside: the norm's sums are taken from the tiles that pass in the product, else by a kernel before it.
    flatten: the loop over tiles and that over depth become one, so that the next tile's loads overlap the epilogue.
    halved: the end of a tile works on one half of its columns after the other, for fewer registers.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int = 8
    stages: int = 3
    tma: bool = True
    programs: int = 1
    flatten: bool = True
    beside: bool = False
    halved: bool = True


@dataclass(frozen=True, kw_only=True)
class ProjectConfig:
    """Compile-time constants of the projection's kernels; see block_kernels. Nothing in it depends on a batch."""

    widths: tuple[int, ...]
    silu: tuple[bool, ...]
    turned: tuple[bool, ...]
    keeps: bool
    first_rows: tuple[int, ...]
    starts: tuple[int, ...]
    shifts: tuple[int, ...]
    dim: int
    head_dim: int
    half: int
    padded_half: int
    padded: bool
    interleaved: bool
    layer: bool
    block_m: int
    block_n: int
    block_k: int
    span: int
    stages: int
    tma: bool
    flatten: bool
    beside: bool
    halved: bool
    dots: bool
    fast_math: bool
    precision: str

    @property
    def outputs(self) -> int:
        return len(self.widths)

    @property
    def all_silu(self) -> bool:
        return all(self.silu)

    @property
    def some_silu(self) -> bool:
        return any(self.silu)

    @property
    def some_turned(self) -> bool:
        return any(self.turned)

    @property
    def rows_n(self) -> int:
        """Rows of W."""
        return sum(self.widths)

    @property
    def tiles_n(self) -> int:
        """Column tiles of all outputs."""
        return self.starts[-1]


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """Compile-time constants of the gate's kernels. heads: rows of a token."""

    width: int
    heads: int
    layer: bool
    activation: str
    rebuild: bool
    block_m: int
    block_n: int
    fast_math: bool


class Stats(NamedTuple):
    """(T,) float32 each; mean is empty for "rms"."""

    mean: Tensor
    rstd: Tensor


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET was set before triton was imported)."""
    return not isinstance(gate_kernel, triton.runtime.JITFunction)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def padded_head(spec: ProjectionSpec) -> int:
    """Columns a turned head takes inside a tile."""
    if not spec.turned:
        return 1
    interleaved = spec.rotary is not None and spec.rotary.pairing == "interleaved"
    return 2 if interleaved else 2 * _power(spec.head_dim // 2)


def pick_tiles(dtype: torch.dtype, spec: ProjectionSpec, *, input_gradient: bool = False) -> BlockTiles:
    """Tiles of the forward's product, or of the input gradient's. No spills for any spec on sm_90 and sm_100."""
    least = max(16, 1 if input_gradient else padded_head(spec))
    if interpreted():
        return BlockTiles(block_m=32, block_n=max(32, least), block_k=32, tma=False, programs=0, flatten=False)
    if dtype == torch.float32:
        return BlockTiles(
            block_m=64, block_n=max(64, least), block_k=32, stages=2, tma=False, programs=0, flatten=False
        )
    blackwell = triton.runtime.driver.active.get_current_target().arch >= 100
    if blackwell and spec.silu and spec.turned and least <= 128 and not input_gradient:
        return BlockTiles(block_m=128, block_n=128, block_k=64, programs=2)
    return BlockTiles(block_m=128, block_n=256, block_k=64, halved=blackwell or not input_gradient)


def project_config(
    spec: ProjectionSpec, dim: int, tiles: BlockTiles, *, dtype: torch.dtype, keeps: bool = False, dots: bool = False
) -> ProjectConfig:
    """Where each output's tiles begin, and the rest."""
    outputs = range(len(spec.widths))
    half = spec.head_dim // 2 if spec.turned else 1
    interleaved = spec.rotary is not None and spec.rotary.pairing == "interleaved"
    padded_half = _power(half)
    padded = bool(spec.turned) and not interleaved and padded_half != half
    span = tiles.block_n // padded_half * half if padded else tiles.block_n
    counts = [-(-width // span) for width in spec.widths]
    starts = tuple(accumulate(counts, initial=0))
    first_rows = tuple(accumulate(spec.widths, initial=0))
    precision = "upcast" if interpreted() else "ieee" if dtype == torch.float32 else "tf32"
    return ProjectConfig(
        widths=spec.widths,
        silu=tuple(i in spec.silu for i in outputs),
        turned=tuple(i in spec.turned for i in outputs),
        keeps=keeps,
        first_rows=first_rows[:-1],
        starts=starts,
        shifts=tuple(first_rows[i] - starts[i] * span for i in outputs),
        dim=dim,
        head_dim=spec.head_dim if spec.turned else 2,
        half=half,
        padded_half=padded_half,
        padded=padded,
        interleaved=interleaved,
        layer=spec.norm == "layer",
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_k=tiles.block_k,
        span=span,
        stages=tiles.stages,
        tma=tiles.tma and not padded,
        flatten=tiles.flatten and (not spec.silu or len(spec.silu) == len(spec.widths)),
        beside=tiles.beside,
        halved=tiles.halved and tiles.block_n // 2 >= max(16, padded_head(spec)),
        dots=dots,
        fast_math=not interpreted() and dtype != torch.float32,
        precision=precision,
    )


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter and cross-compilation: any number will do
    return torch.cuda.get_device_properties(device).multi_processor_count


def _grid(tiles: BlockTiles, count: int, device: torch.device) -> tuple[int]:
    return (min(count, tiles.programs * _multiprocessors(device)) if tiles.programs else count,)


def tma_fits(*tensors: Tensor) -> bool:
    """Whether the copy engine can read these matrices: 16-byte bases and rows, nothing empty."""
    for x in tensors:
        aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(1) == 1
        if not aligned or x.numel() == 0:
            return False
    return True


def rows_last(x: Tensor) -> Tensor:
    """x with its last dim contiguous, as the kernels need it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def row_sums(weight: Tensor, spec: ProjectionSpec) -> Tensor | None:
    """(N,) float32, for "layer"."""
    return weight.sum(dim=1, dtype=torch.float32) if spec.norm == "layer" else None


def _empty_stats(x: Tensor, spec: ProjectionSpec | GateSpec, rows: int) -> Stats:
    mean = torch.empty(rows if spec.norm == "layer" else 0, dtype=torch.float32, device=x.device)
    return Stats(mean, torch.empty(rows, dtype=torch.float32, device=x.device))


def project(
    x: Tensor,
    weight: Tensor,
    table: Tensor | None,
    *,
    spec: ProjectionSpec,
    keep: bool = False,
    tiles: BlockTiles | None = None,
) -> tuple[list[Tensor], list[Tensor], Stats]:
    """(outputs, pre-activations of the activated outputs if keep, the norm's statistics)."""
    x, weight = rows_last(x), weight.contiguous()
    widths = list(enumerate(spec.widths))
    outs = [x.new_empty(x.shape[0], width) for _, width in widths]
    keep = keep and bool(spec.silu)
    # where nothing is kept, the kernel writes nothing either: any tensor will do
    preacts = [x.new_empty(x.shape[0] if i in spec.silu else 0, width) if keep else x for i, width in widths]
    stats = _empty_stats(x, spec, x.shape[0])
    kept_z = [preacts[i] for i in sorted(spec.silu)] if keep else []
    if x.shape[0] == 0:
        return outs, kept_z, stats
    tiles = tiles or pick_tiles(x.dtype, spec)
    tiles = replace(tiles, tma=tiles.tma and tma_fits(x, weight))
    c = project_config(spec, x.shape[1], tiles, keeps=keep, dtype=x.dtype)
    if not tiles.beside:
        _launch_stats(x, stats, spec, c)
    count = triton.cdiv(x.shape[0], c.block_m) * c.tiles_n
    block_kernels.project_kernel[_grid(tiles, count, x.device)](
        TensorDescriptor.from_tensor(x, [c.block_m, c.block_k]) if c.tma else x,
        x,
        x.stride(0),
        TensorDescriptor.from_tensor(weight, [c.block_n, c.block_k]) if c.tma else weight,
        row_sums(weight, spec),
        table,
        tuple(outs),
        tuple(preacts),
        stats.mean,
        stats.rstd,
        x.shape[0],
        spec.eps,
        C=c,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return outs, kept_z, stats


def _launch_stats(x: Tensor, stats: Stats, spec: ProjectionSpec, c: ProjectConfig) -> None:
    depth = min(1024, _power(c.dim))
    config = replace(c, block_m=max(1, 4096 // depth), block_k=depth)
    block_kernels.stats_kernel[(triton.cdiv(x.shape[0], config.block_m),)](
        x, x.stride(0), stats.mean, stats.rstd, x.shape[0], spec.eps, C=config, num_warps=4
    )


def gradient(
    grads: Sequence[Tensor],
    preacts: Sequence[Tensor],
    weight: Tensor,
    table: Tensor | None,
    stats: Stats,
    *,
    spec: ProjectionSpec,
    dots: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(g (T, N), dots (2, T) float32 or empty, g^T @ mean (N,) float32 or empty); see gradient_kernel."""
    tokens, dtype = grads[0].shape[0], grads[0].dtype
    places = iter(preacts)
    keeps = [i in spec.silu for i in range(len(spec.widths))]
    all_preacts = tuple(next(places) if kept else None for kept in keeps)
    grads = [rows_last(grad) for grad in grads]
    block_n = max(128, padded_head(spec))
    tiles = BlockTiles(block_m=max(16, 8192 // block_n), block_n=block_n, block_k=16, stages=2, tma=False)
    c = project_config(spec, weight.shape[1], tiles, dtype=dtype, dots=dots)
    programs = triton.cdiv(tokens, c.block_m)
    g = grads[0].new_empty(tokens, c.rows_n)
    scalars = torch.empty(2 if dots else 0, tokens, dtype=torch.float32, device=g.device)
    shares = torch.empty(programs if c.layer else 0, c.rows_n, dtype=torch.float32, device=g.device)
    if tokens:
        block_kernels.gradient_kernel[(programs,)](
            tuple(grads),
            tuple(grad.stride(0) for grad in grads),
            all_preacts,
            table,
            stats.mean,
            stats.rstd,
            row_sums(weight, spec) if dots else None,
            g,
            scalars,
            shares,
            tokens,
            C=c,
            num_warps=16,
        )
    return g, scalars, shares.sum(0) if c.layer else shares.new_empty(0)


def input_gradient(
    g: Tensor, weight: Tensor, x: Tensor, stats: Stats, dots: Tensor, *, spec: ProjectionSpec,
    tiles: BlockTiles | None = None,
) -> Tensor:  # fmt: skip
    """dx by one product with the norm's backward in its epilogue."""
    x, weight = rows_last(x), weight.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return dx
    tiles = tiles or pick_tiles(x.dtype, spec, input_gradient=True)
    tiles = replace(tiles, tma=tiles.tma and tma_fits(g, weight))
    plain = ProjectionSpec(widths=spec.widths, norm=spec.norm, eps=spec.eps)  # no turning here, so no padded tiles
    c = project_config(plain, x.shape[1], tiles, dtype=x.dtype)
    count = triton.cdiv(x.shape[0], c.block_m) * triton.cdiv(x.shape[1], c.block_n)
    block_kernels.input_gradient_kernel[_grid(tiles, count, x.device)](
        TensorDescriptor.from_tensor(g, [c.block_m, c.block_k]) if c.tma else g,
        g,
        TensorDescriptor.from_tensor(weight, [c.block_k, c.block_n]) if c.tma else weight,
        x,
        x.stride(0),
        stats.mean,
        stats.rstd,
        dots,
        dx,
        x.shape[0],
        C=c,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return dx


def norm_gradient(product: Tensor, x: Tensor, stats: Stats, *, spec: ProjectionSpec) -> Tensor:
    """dx out of G = g @ W."""
    x, product = rows_last(x), product.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return dx
    block_n = _power(x.shape[1])
    tiles = BlockTiles(block_m=max(1, 4096 // block_n), block_n=block_n, block_k=16, tma=False)
    plain = ProjectionSpec(widths=spec.widths, norm=spec.norm, eps=spec.eps)
    c = project_config(plain, x.shape[1], tiles, dtype=x.dtype)
    block_kernels.norm_gradient_kernel[(triton.cdiv(x.shape[0], c.block_m),)](
        product, x, x.stride(0), stats.mean, stats.rstd, dx, x.shape[0], C=c, num_warps=8
    )
    return dx


# ------------------------------------------------------------------------------------------------ gate


def gate_config(attention: Tensor, spec: GateSpec, *, rebuild: bool = False) -> GateConfig:
    """Rows of a program: as many as make about 4096 elements."""
    heads, dim = attention.shape[1:]
    width = dim if spec.per_head else heads * dim
    block_n = _power(width)
    return GateConfig(
        width=width,
        heads=heads if spec.per_head else 1,
        layer=spec.norm == "layer",
        activation=spec.activation,
        rebuild=rebuild,
        block_m=max(1, _GATE_ELEMENTS // block_n),
        block_n=block_n,
        fast_math=not interpreted() and attention.dtype != torch.float32,
    )


def gate(attention: Tensor, u: Tensor, *, spec: GateSpec) -> tuple[Tensor, Stats]:
    """(act(u) * norm(attention) (T, H * E), statistics of its rows)."""
    attention, u = attention.contiguous(), rows_last(u)
    c = gate_config(attention, spec)
    rows = attention.shape[0] * c.heads
    y = attention.new_empty(u.shape)
    stats = _empty_stats(attention, spec, rows)
    if rows:
        gate_kernel[(triton.cdiv(rows, c.block_m),)](
            attention, u, u.stride(0), y, stats.mean, stats.rstd, rows, spec.eps, C=c, **_gate_options(c)
        )
    return y, stats


def gate_gradient(
    dy: Tensor, attention: Tensor, u: Tensor, stats: Stats, *, spec: GateSpec, rebuild: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of attention, of u, y again or empty)."""
    dy, attention, u = dy.contiguous(), attention.contiguous(), rows_last(u)
    c = gate_config(attention, spec, rebuild=rebuild)
    rows = attention.shape[0] * c.heads
    da, du = torch.empty_like(attention), attention.new_empty(u.shape)
    y = attention.new_empty(u.shape if rebuild else (0,))
    if rows:
        gate_gradient_kernel[(triton.cdiv(rows, c.block_m),)](
            dy, attention, u, u.stride(0), stats.mean, stats.rstd, da, du, y, rows, C=c, **_gate_options(c)
        )
    return da, du, y


def _gate_options(c: GateConfig) -> dict[str, Any]:
    return {"num_warps": 4 if c.block_m * c.block_n <= 4096 else 8}
