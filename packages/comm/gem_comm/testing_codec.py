"""What any Codec must do, and the numbers that the suites put in (public through testing.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_comm.interface import Codec


def values(position: int, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """What the rank at `position` puts in: known to all."""
    generator = torch.Generator().manual_seed(1000 * seed + position)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3 ** (position % 4)).to(dtype)


def check_codec(
    codec: Codec, *, device: str = "cpu", error_share: float | None = None, error_floor: float = 1e-9
) -> None:
    """A codec in one process: rows of bytes, each alone, within the bound it states; what is not finite stays so.

    A row of zeros must come as zeros. The bound is bounded too: with b bits a number, by 2^(1 - b / 2) of the largest
    number of the row and at most by half of it (half of the bits may go into exponents), plus error_floor. bf16 may be
    off by 2^-7 (it says 2^-8), fp8 and int8 by 2^-3 (they say 2^-4 and 2^-8).

    error_share   a codec's own share of the largest number instead, above 0 and below 1
    error_floor   what the bound may add whatever the row's size, at least 0 and below 1: 1e-9, a tenth of the usual
                  epsilon of Adam. Numbers of fixed steps, or float16 without a scale (2^-25), name their own.
                  Example: a row [0, 3e-8] as float16 may become [0, 5.96e-8], off by as much as the number itself.
    """
    assert isinstance(codec.name, str)
    assert codec.name, "a codec has a name"
    bits = 8 * codec.row_bytes(4096) // 4096
    share = min(0.5, 2.0 ** (1 - bits / 2)) if error_share is None else error_share
    if not 0 < share < 1:
        raise ValueError(f"error_share is {share}, expected above 0 and below 1: at 1 a codec may send only zeros")
    if not 0 <= error_floor < 1:
        raise ValueError(f"error_floor is {error_floor}, expected at least 0 and below 1, the size of the numbers here")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for rows, columns in ((5, 4), (3, 300), (1, 1), (0, 7)):
            what = f"{codec.name} of {rows} x {columns} {dtype}"
            x_RD = values(rows, (rows, columns), dtype).to(device)
            if rows > 1:
                x_RD[1] = 0
            given_RD = x_RD.clone()
            payload_RP = codec.encode(x_RD)
            expected = (torch.uint8, (rows, codec.row_bytes(columns)))
            assert (payload_RP.dtype, tuple(payload_RP.shape)) == expected, (
                f"{what}: {payload_RP.shape}, row_bytes says {expected}"
            )
            sent_RP = payload_RP.clone()
            found_RD, bound_RD = codec.decode(payload_RP, columns), codec.error_bound(x_RD)
            assert torch.equal(x_RD, given_RD), f"{what}: x was changed"
            assert torch.equal(payload_RP, sent_RP), f"{what}: decode changed the bytes"
            assert found_RD.dtype == bound_RD.dtype == torch.float32, f"{what}: {found_RD.dtype}, {bound_RD.dtype}"
            assert found_RD.shape == bound_RD.shape == x_RD.shape, f"{what}: {found_RD.shape}, {bound_RD.shape}"
            error_RD = (found_RD.double() - x_RD.double()).abs()
            assert (error_RD <= bound_RD.double() * (1 + 1e-6)).all(), f"{what}: error {error_RD} over {bound_RD}"
            largest_R1 = x_RD.double().abs().amax(1, keepdim=True)
            zeros_R = largest_R1.flatten() == 0
            assert not found_RD[zeros_R].any(), f"{what}: a row of zeros came as {found_RD[zeros_R]}"
            allowed_R1 = share * largest_R1 + max(error_floor, torch.finfo(torch.float32).tiny)
            wide_RD = bound_RD.double() > allowed_R1
            assert not wide_RD.any(), (
                f"{what}: error_bound allows {bound_RD[wide_RD]}, expected at most {share:.3g} of the row's largest "
                f"number {largest_R1.flatten()} at {bits} bits a number, plus {error_floor:.3g}; a codec that loses "
                "more says error_share or error_floor"
            )
            decoded_RD = found_RD.clone()
            codec.decode(codec.encode(x_RD + 1), columns)
            assert torch.equal(payload_RP, sent_RP), f"{what}: the next rows' bytes came into these"
            assert torch.equal(found_RD, decoded_RD), f"{what}: the next rows' numbers came into these"
            for row in range(rows):
                assert torch.equal(codec.encode(x_RD[row : row + 1]), payload_RP[row : row + 1]), (
                    f"{what}: row {row} alone"
                )
    _check_not_finite(codec, device)


def _check_not_finite(codec: Codec, device: str) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x_RD = values(1, (2, 6), torch.float32).to(device)
        clean_RD = codec.decode(codec.encode(x_RD), 6)
        x_RD[0, 3] = bad
        found_RD = codec.decode(codec.encode(x_RD), 6)
        assert torch.equal(found_RD[1], clean_RD[1]), f"{codec.name}: {bad} in a row changed the next one"
        came = float(found_RD[0, 3])
        assert came != came or came == bad, f"{codec.name}: {bad} came as {came}"
