"""The softmax attentions that come with PyTorch, behind the signature of attention_peers.py; no package is carried.

cuDNN takes rectangles: full-length shapes as they are, jagged ones through nested tensors where this PyTorch lets them
reach it (else the row tells why not). `varlen_attn` is FlashAttention 2 over packed rows. FlexAttention gets the packed
rows as one sequence with a mask of documents, made once outside the time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attention_shapes import Shape
from torch import Tensor

Call = Callable[..., Tensor]


def softmax_contenders(shape: Shape) -> dict[str, Callable[[], Call]]:
    """Name -> maker, for a softmax shape."""
    makers: dict[str, Callable[[], Call]] = {
        "varlen FA2": lambda: varlen(shape),
        "FlexAttention": lambda: flex(shape),
    }
    if len(set(shape.q_lengths)) == 1:
        makers["cuDNN"] = lambda: cudnn_dense(shape)
    else:
        makers["cuDNN, nested"] = lambda: cudnn_nested(shape)
    return makers


def _offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to("cuda", torch.int32)


def varlen(shape: Shape) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    offsets, longest = _offsets(shape.q_lengths), max(shape.q_lengths)
    return lambda q, k, v: varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0))


def flex(shape: Shape) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # its backward is timed with the graph kept
    torch._functorch.config.donated_buffer = False
    tokens = sum(shape.q_lengths)
    lengths = torch.tensor(shape.q_lengths, device="cuda")
    document = torch.repeat_interleave(torch.arange(len(lengths), device="cuda", dtype=torch.int32), lengths)

    def packed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        del b, h
        return (document[i] == document[j]) & (i >= j)

    mask = create_block_mask(packed, None, None, tokens, tokens, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=mask)
        return out[0].transpose(0, 1)

    return call


def cudnn_dense(shape: Shape) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, length = len(shape.q_lengths), shape.q_lengths[0]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(batch * length, shape.heads, shape.dim)

    return call


def cudnn_nested(shape: Shape) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    offsets = _offsets(shape.q_lengths).long()
    least, longest = min(shape.q_lengths), max(shape.q_lengths)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nested = [
            torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=least, max_seqlen=longest) for x in (q, k, v)
        ]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in nested), is_causal=True)
        return out.transpose(1, 2).values()

    return call
