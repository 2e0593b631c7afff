"""Shared keys and values as plain cross attention.

Impressions of one request read the same history. Without a mask a row of q does not know which sample it is in, only
which kv row it reads; and since kv_index is non-decreasing, the samples of one kv row are neighbours in q. So they are
one longer run of queries, and K and V are read once per request, with no gather and no atomics in backward.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gem_attention.interface import Layout


def without_kv_index(layout: Layout) -> Layout:
    """The same attention with one row of q per row of k; the caller repeats the result for broadcast queries.

    Example: q_offsets [0, 2, 5, 6], kv_index [0, 0, 2], three kv rows -> q_offsets [0, 5, 5, 6].
    """
    if layout.kv_index is None:
        return layout
    rows = layout.k_offsets.shape[0] - 1
    if layout.q_offsets is None:
        return replace(layout, kv_index=None, batch_size=rows)
    first = torch.searchsorted(layout.kv_index, torch.arange(rows + 1, device=layout.kv_index.device))
    return replace(
        layout,
        kv_index=None,
        batch_size=rows,
        q_offsets=layout.q_offsets[first],
        max_q_len=layout.total_q,  # an upper bound that needs no wait for the device
    )


def repeat_rows(out_RSHE: Tensor, kv_index: Tensor | None) -> Tensor:
    """Broadcast queries: the result of a kv row is that of each of its samples."""
    return out_RSHE if kv_index is None else out_RSHE.index_select(0, kv_index)
