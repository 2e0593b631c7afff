"""Codecs: rows of floating-point numbers as fewer bytes. Each row carries its own scale, so rows travel apart.

    bf16   2 bytes a number. Rounding to nearest: off by at most 2^-8 of the number
    fp8    e4m3, 1 byte a number and 4 a row: scale = largest / 448. Off by at most 2^-4 of the number, or, for numbers
           below 2^-6 of the scale's unit, by 2^-10 units
    int8   1 byte a number and 4 a row: scale = largest / 127. Off by at most half a scale

Scales are float32, so a row's largest number survives up to float32's range. A row with an infinity or NaN keeps the
others' places but not their values in fp8 and int8: the whole row becomes NaN, and stays visible. Cost: one pass to
read and one to write, a few percent of the time that the saved bytes take on a network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny


def _rows(x_RD: Tensor) -> Tensor:
    return x_RD.detach().to(torch.float32)


class Bf16Codec:
    """bfloat16."""

    name = "bf16"

    def encode(self, x_RD: Tensor) -> Tensor:
        if x_RD.numel() == 0:  # counts as contiguous whatever its strides, and view would refuse them
            return x_RD.new_empty(x_RD.shape[0], self.row_bytes(x_RD.shape[1]), dtype=torch.uint8)
        return x_RD.detach().to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, payload_RP: Tensor, columns: int) -> Tensor:
        return payload_RP.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).to(torch.float32)

    def row_bytes(self, columns: int) -> int:
        return 2 * columns

    def error_bound(self, x_RD: Tensor) -> Tensor:
        return _rows(x_RD).abs() * 2.0**-8 + 2.0**-133


class _Scaled(ABC):
    """Numbers divided by the row's scale, one byte each, then the scale."""

    name: str
    largest: float

    def encode(self, x_RD: Tensor) -> Tensor:
        x = _rows(x_RD)
        scale_R1 = self.scale(x)
        numbers = self.to_bytes(x / scale_R1)
        return torch.cat([numbers, scale_R1.reshape(-1).view(torch.uint8).view(-1, 4)], dim=1)

    def decode(self, payload_RP: Tensor, columns: int) -> Tensor:
        # clone, not contiguous: a single row counts as contiguous and would keep an offset that is no multiple of 4
        scale_R1 = payload_RP[:, columns:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return self.from_bytes(payload_RP[:, :columns].contiguous()) * scale_R1

    def row_bytes(self, columns: int) -> int:
        return columns + 4

    def scale(self, x_RD: Tensor) -> Tensor:
        """(R, 1) float32; 1 for a row of zeros (or of no columns), NaN for a row that is not finite."""
        if x_RD.shape[1] == 0:
            return x_RD.new_ones(x_RD.shape[0], 1)
        largest_R1 = x_RD.abs().amax(dim=1, keepdim=True)
        scale_R1 = torch.where(largest_R1 > 0, (largest_R1 / self.largest).clamp_min(_TINY), 1.0)
        return torch.where(largest_R1.isfinite(), scale_R1, torch.nan)

    def unit(self, x_RD: Tensor) -> Tensor:
        """The scale, for error bounds: 0 for a row of zeros, which is coded exactly."""
        return torch.where(x_RD.eq(0).all(dim=1, keepdim=True), 0.0, self.scale(x_RD))

    @abstractmethod
    def to_bytes(self, scaled_RD: Tensor) -> Tensor:
        """(R, D) uint8 of numbers within +-largest."""

    @abstractmethod
    def from_bytes(self, numbers_RD: Tensor) -> Tensor:
        """(R, D) float32 of what to_bytes made."""


class Fp8Codec(_Scaled):
    """float8 e4m3 with a scale a row."""

    name = "fp8"
    largest = 448.0

    def to_bytes(self, scaled_RD: Tensor) -> Tensor:
        return scaled_RD.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)

    def from_bytes(self, numbers_RD: Tensor) -> Tensor:
        return numbers_RD.view(torch.float8_e4m3fn).to(torch.float32)

    def error_bound(self, x_RD: Tensor) -> Tensor:
        x = _rows(x_RD)
        # 2^-22 of the number: dividing by the scale and multiplying with it round once each in float32.
        return x.abs() * (2.0**-4 + 2.0**-22) + self.unit(x) * 2.0**-10


class Int8Codec(_Scaled):
    """int8 with a scale a row."""

    name = "int8"
    largest = 127.0

    def to_bytes(self, scaled_RD: Tensor) -> Tensor:
        return scaled_RD.nan_to_num(0.0).round().clamp(-127.0, 127.0).to(torch.int8).view(torch.uint8)

    def from_bytes(self, numbers_RD: Tensor) -> Tensor:
        return numbers_RD.view(torch.int8).to(torch.float32)

    def error_bound(self, x_RD: Tensor) -> Tensor:
        x = _rows(x_RD)
        return self.unit(x) * 0.5 + x.abs() * 2.0**-22
