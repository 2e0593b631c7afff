"""What the Triton kernels are compiled for: one frozen value that holds every compile-time choice, and the tile sizes.

Design: a kernel takes tensors, a few grouped run-time numbers, and this one constant. Every field is a property of the
model (activation, mask rules, head dim) or a choice of ours (tile sizes); nothing in it depends on a batch, so a model
compiles each kernel once, whatever the lengths. Window size, scale and divisor are run-time numbers.
Cost: one compiled variant for each (spec, dtype, head dim) and kernel. No triton import here: the table can be read,
tested and cross-compiled anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gem_attention.interface import AttentionSpec

MAX_DIM = 256
_MIN_DOT = 16  # smallest side of a matrix product in Triton


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """block_m query rows and block_n key rows a tile; warps and stages as Triton means them.

    tma: rows are loaded by the copy engine through descriptors that clip at the sequence's end, else by pointers.
    registers: most registers a thread may have (so that two programs fit on a multiprocessor); 0 leaves it open.
    programs: programs a multiprocessor, for the kernel that has as many as fit on the card (tables).
    """

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 2
    tma: bool = False
    registers: int = 0
    programs: int = 1

    @property
    def launch(self) -> dict[str, int]:
        """The launch options these tiles stand for."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"maxnreg": self.registers} if self.registers else options


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Compile-time constants of one kernel (all of them; hashable, and its repr is part of the compile key).

    precision: of matrix products of float32 operands; "upcast" (the interpreter) widens all operands to float32 first.
    masked_tail: columns past the end of the keys must be masked, because f(0) there would count (softmax); elsewhere
    rows that are loaded as zero add nothing, so only the mask's own boundary tiles need a mask.
    """

    activation: str
    query: str
    causal: bool
    targets: bool
    context: bool
    window: bool
    min_full: bool
    block: int
    grouped: bool
    distinct_targets: bool
    shared_kv: bool
    per_token: bool
    position_bias: bool
    time_bias: str
    time_count: int
    max_positions: int
    bias_inside: bool
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    block_d: int
    block_e: int
    block_m: int
    block_n: int
    stages: int
    tma: bool
    fast_math: bool
    precision: str

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.heads // self.kv_heads

    @property
    def masked(self) -> bool:
        """Whether any tile can need a mask."""
        return self.rules or self.masked_tail

    @property
    def rules(self) -> bool:
        """Whether the mask has any rule."""
        return self.causal or self.targets or self.context or self.window or self.block > 0

    @property
    def masked_tail(self) -> bool:
        return self.activation == "softmax"

    @property
    def softmax(self) -> bool:
        return self.activation == "softmax"

    @property
    def biased(self) -> bool:
        return self.position_bias or self.time_bias != ""


def padded_dim(dim: int) -> int:
    """The power of two a head dim is padded to inside a tile (memory is not padded)."""
    return max(_MIN_DOT, 1 << (dim - 1).bit_length())


@lru_cache(maxsize=1024)  # one entry a spec and kernel: built anew it costs 30 us a launch
def kernel_spec(
    spec: AttentionSpec,
    tiles: Tiles,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    shared_kv: bool = False,
    fast_math: bool = True,
    precision: Literal["tf32", "ieee", "upcast"] = "tf32",
) -> KernelSpec:
    """The compile-time constants for one spec, head shape and choice of tiles."""
    mask, bias = spec.mask, spec.bias
    block_m, block_n = tiles.block_m, tiles.block_n
    return KernelSpec(
        activation=spec.activation,
        query=spec.query,
        causal=mask.causal,
        targets=mask.targets,
        context=mask.context,
        window=mask.window > 0,
        min_full=mask.min_full_rows > 0,
        block=mask.block,
        grouped=mask.target_group_size > 1,
        distinct_targets=mask.semantics == "nvidia",
        shared_kv=shared_kv,
        per_token=spec.divisor == "per_token",
        position_bias=bias is not None and bias.max_positions > 0,
        time_bias=bias.time.function if bias is not None and bias.time is not None else "",
        time_count=bias.time.count if bias is not None and bias.time is not None else 0,
        max_positions=bias.max_positions if bias is not None else 0,
        bias_inside=bias is not None and bias.where == "inside_scale",
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        v_dim=v_dim,
        block_d=padded_dim(dim),
        block_e=padded_dim(v_dim),
        block_m=block_m,
        block_n=block_n,
        stages=tiles.stages,
        tma=tiles.tma,
        fast_math=fast_math,
        precision=precision,
    )


Kernel = Literal["forward", "dq", "dkv", "tables", "short"]

# (kernel, padded head dim) -> tiles. Chosen on an H200, see benchmarks/gpu/NOTES-attention.md.
_TILES: dict[tuple[str, int], Tiles] = {
    ("forward", 64): Tiles(block_m=64, block_n=64, warps=4, stages=3, tma=True, registers=128),
    ("forward", 128): Tiles(block_m=64, block_n=64, warps=4, stages=3, tma=True),
    ("forward", 256): Tiles(block_m=64, block_n=64, warps=8, stages=2, tma=True),
    ("dq", 64): Tiles(block_m=64, block_n=64, warps=4, stages=3, tma=True, registers=168),
    ("dq", 128): Tiles(block_m=64, block_n=64, warps=4, stages=3, tma=True),
    ("dq", 256): Tiles(block_m=64, block_n=32, warps=8, stages=2),
    ("dkv", 64): Tiles(block_m=64, block_n=64, warps=4, stages=3, tma=True),
    ("dkv", 128): Tiles(block_m=64, block_n=64, warps=4, stages=2),
    ("dkv", 256): Tiles(block_m=32, block_n=64, warps=8, stages=2),
    ("tables", 64): Tiles(block_m=64, block_n=64, warps=8, stages=2, tma=True),
    ("tables", 128): Tiles(block_m=32, block_n=32, warps=2, stages=2, registers=160, programs=6),
    ("tables", 256): Tiles(block_m=32, block_n=32, warps=4, stages=2),
    ("short", 64): Tiles(block_m=64, block_n=64, warps=4, stages=3, tma=True),
    ("short", 128): Tiles(block_m=64, block_n=64, warps=4, stages=3, tma=True),
}
# short visits (a window) and unmasked ones have their own best choices at head dim 128
_WINDOW_TILES: dict[tuple[str, int], Tiles] = {
    ("forward", 128): Tiles(block_m=64, block_n=64, warps=4, stages=2, tma=True, registers=168),
    ("dkv", 128): Tiles(block_m=32, block_n=64, warps=4, stages=2),
}
_UNMASKED_TILES: dict[tuple[str, int], Tiles] = {
    ("dkv", 128): Tiles(block_m=32, block_n=64, warps=4, stages=4, tma=True),
}

# a bias needs registers of its own: narrower tiles in the backward
_BIAS_TILES: dict[tuple[str, int], Tiles] = {
    ("forward", 64): Tiles(block_m=64, block_n=64, warps=4, stages=2, tma=True),
    ("forward", 128): Tiles(block_m=64, block_n=64, warps=4, stages=2, tma=True),
    ("dq", 128): Tiles(block_m=64, block_n=32, warps=4, stages=2, tma=True),
    ("dkv", 128): Tiles(block_m=32, block_n=64, warps=4, stages=2, tma=True),
}


@lru_cache(maxsize=1024)
def pick_tiles(kernel: Kernel, spec: AttentionSpec, *, dim: int, v_dim: int, float32: bool = False) -> Tiles:
    """Tile sizes for a kernel and head dim; block masks get tiles of their block, float32 small tiles."""
    if float32:
        return Tiles(block_m=32, block_n=32, warps=4, stages=1)
    mask, key = spec.mask, (kernel, max(64, padded_dim(max(dim, v_dim))))
    pointwise = spec.activation != "softmax" and spec.bias is None
    tiles = _TILES[key]
    if pointwise and mask.window:
        tiles = _WINDOW_TILES.get(key, tiles)
    elif pointwise and mask == type(mask)():
        tiles = _UNMASKED_TILES.get(key, tiles)
    if not pointwise and kernel != "tables":
        tiles = replace(tiles, registers=0)
    if spec.bias is not None:
        tiles = _BIAS_TILES.get(key, tiles)
    if mask.block == 64:
        tiles = replace(tiles, block_m=64, block_n=64)
        if kernel == "tables":
            tiles = replace(tiles, warps=8, registers=0, programs=1)
    return tiles
