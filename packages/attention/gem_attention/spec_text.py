"""A spec from its text (AttentionSpec.to_text makes it).

Operators of torch.library take no objects, and test vectors are read by other programs: both carry a spec as text.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from gem_attention.interface import AttentionSpec, BiasSpec, MaskSpec, TimeBuckets


@lru_cache(maxsize=256)
def spec_from_text(text: str) -> AttentionSpec:
    return spec_from_fields(json.loads(text))


def spec_from_fields(fields: dict[str, Any]) -> AttentionSpec:
    """The inverse of dataclasses.asdict; an unknown field is a TypeError that names it."""
    bias = fields["bias"]
    if bias is not None:
        time = None if bias["time"] is None else TimeBuckets(**bias["time"])
        bias = BiasSpec(**{**bias, "time": time})
    return AttentionSpec(**{**fields, "mask": MaskSpec(**fields["mask"]), "bias": bias})
