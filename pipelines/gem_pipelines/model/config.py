"""`ModelConfig`: everything that decides the shape and the formulas of the dense model and the dims of its tables.

Plain values only, so that a config prints, compares and travels as JSON. What follows from a config and a schema
together (token counts, which feature feeds which stream) is worked out once, in plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

BlockKind = Literal["hstu", "pffn", "window", "interformer"]
SummaryKind = Literal["hsp", "interformer"]
InteractionKind = Literal["wukong", "dhen", "experts"]
DhenMember = Literal["fm", "linear", "dcn", "mlp", "attention"]
HeadKind = Literal["separate", "shared_bottom", "mmoe"]
NormKind = Literal["layer", "rms"]
AttentionImpl = Literal["reference", "eager", "triton", "auto"]
HstuImpl = Literal["layers", "reference", "eager", "triton"]
Compute = Literal["float32", "bfloat16"]
CompiledPart = Literal["features", "interaction", "heads"]
GraphedPart = Literal["summaries", "interaction", "heads"]
HstuRecompute = Literal["normed_x", "preactivations", "gated", "projected"]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How one event stream is modelled: every stream has sizes of its own.

    A stream's tokens are [`cls_tokens` made of the features | events, oldest first | the candidate].
    """

    dim: int = 32
    """Width of the stream's tokens."""
    heads: int = 2
    """Attention heads; they divide dim into an even head dim."""
    blocks: tuple[BlockKind, ...] = ("hstu", "hstu")
    """One sequence block per layer. A stream with fewer blocks than the model has layers keeps its tokens and summary
    from then on. "hstu": causal, SiLU scores, gated output. "pffn": Kunlun's GDPA feed-forward with weights made from
    the features. "window": softmax self-attention, both ways, within `window`. "interformer": a feed-forward with
    weights made from the features, then softmax self-attention."""
    summary: SummaryKind = "interformer"
    """What the features see of the stream. "hsp": seeds attend to it, then SumKronLinear. "interformer": a gate over
    [cls | pooled by seeds | recent events]. The candidate's token is added to either."""
    window: int = 0
    """Attention reaches this many tokens back (and, where it looks both ways, ahead); 0: all. "window" needs > 0."""
    skip: bool = True
    """CompSkip: a "window" block's layer reuses the summary of the layer before."""
    cls_tokens: int = 0
    """Tokens made of the features and prepended as context."""
    candidate: bool = True
    """Append the row's candidate as the last token, made of the scalars that share tables with the stream's fields."""
    seeds: int = 4
    """Learned queries: pooled tokens of "interformer", seeds of "hsp"."""
    summary_tokens: int = 2
    """Tokens that "hsp" compresses its seeds to; fewer than seeds."""
    kron_terms: int = 2
    """Terms of SumKronLinear."""
    target_read: bool = False
    """One more token: unnormalised sums over the events, weighted by how alike their ids are to the candidate's. It
    keeps how much of the past matches, which the norms of blocks and summaries take away. Needs a candidate."""
    recent_tokens: int = 2
    """Latest events that an "interformer" summary contains as they are."""
    weight_tokens: int = 4
    """Tokens made of the features, from which "pffn" and "interformer" blocks make their weights."""
    score_divisor: float | None = None
    """HSTU: what the sum over events is divided by. PFFN: what scores are divided by (tau). None: the stream's longest
    possible length. Never the length of a batch."""
    rotary: bool = True
    """Turn q and k by position and log time gap."""
    per_request: bool = True
    """Where rows are requests: the stream is computed once for all impressions of a request, which is exact and must be
    so: events may depend on nothing that differs between impressions. Refused for context tokens, for blocks that make
    weights from the features, and for a "window" beside a candidate; False computes the stream once an impression."""
    rotary_time_scale_s: float = 60.0
    """Time gaps well below this look alike."""

    def __post_init__(self) -> None:
        _check(self.dim > 0 and self.heads > 0, f"dim and heads must be > 0, got {self.dim} and {self.heads}")
        _check(self.dim % (2 * self.heads) == 0, f"dim={self.dim} must be a multiple of 2 * heads={2 * self.heads}")
        _check(self.window >= 0, f"window must be >= 0, got {self.window}")
        _check("window" not in self.blocks or self.window > 0, 'a "window" block needs window > 0')
        _check(self.seeds > 0 and self.weight_tokens > 0, "seeds and weight_tokens must be > 0")
        _check(self.cls_tokens >= 0 and self.recent_tokens >= 0, "cls_tokens and recent_tokens must be >= 0")
        _check(
            self.summary != "hsp" or 0 < self.summary_tokens < self.seeds,
            f'"hsp" compresses: 0 < summary_tokens < seeds, got {self.summary_tokens} and {self.seeds}',
        )
        _check(self.kron_terms > 0, f"kron_terms must be > 0, got {self.kron_terms}")
        _check(self.score_divisor is None or self.score_divisor > 0, f"score_divisor={self.score_divisor}: must be > 0")
        _check(self.rotary_time_scale_s > 0, f"rotary_time_scale_s={self.rotary_time_scale_s}: must be > 0")


@dataclass(frozen=True, kw_only=True)
class InteractionConfig:
    """How feature tokens meet: one such module per layer."""

    kind: InteractionKind = "wukong"
    """"wukong": FMB and LCB. "dhen": members in parallel, summed. "experts": Kunlun's mixture, Wukong modules on parts
    of the tokens, outputs concatenated."""
    fm_tokens: int = 4
    """Output tokens of the factorization machine block (of all experts together)."""
    linear_tokens: int = 4
    """Output tokens of the linear compression block (of all experts together)."""
    rank: int = 8
    """k of the low-rank factorization machine X (X^T Y), Y of n x k."""
    hidden: tuple[int, ...] = (64,)
    """Hidden layers of the MLPs."""
    members: tuple[DhenMember, ...] = ("fm", "linear", "dcn")
    """"dhen": what runs in parallel."""
    experts: int = 2
    """"experts": how many."""
    dcn_rank: int = 16
    """Rank of the cross layer of member "dcn"."""

    def __post_init__(self) -> None:
        _check(self.fm_tokens > 0 and self.linear_tokens > 0, "fm_tokens and linear_tokens must be > 0")
        _check(self.rank > 0 and self.dcn_rank > 0, "rank and dcn_rank must be > 0")
        _check(self.kind != "dhen" or len(self.members) > 0, '"dhen" needs members')
        _check(len(set(self.members)) == len(self.members), f"members repeat: {self.members}")
        if self.kind == "experts":
            for name, value in (("fm_tokens", self.fm_tokens), ("linear_tokens", self.linear_tokens)):
                _check(
                    self.experts > 0 and value % self.experts == 0,
                    f"{name}={value} must be a multiple of experts={self.experts}",
                )

    @property
    def tokens(self) -> int:
        """Tokens that come out."""
        return self.fm_tokens + self.linear_tokens


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """From tokens to one logit per task."""

    kind: HeadKind = "shared_bottom"
    """"separate": an MLP per task. "shared_bottom": a shared MLP below. "mmoe": shared experts, a gate per task."""
    shared: tuple[int, ...] = (64,)
    """Hidden layers of the shared MLP, or of each expert."""
    hidden: tuple[int, ...] = (32,)
    """Hidden layers of each task's MLP."""
    experts: int = 4
    """"mmoe": how many."""

    def __post_init__(self) -> None:
        _check(self.kind == "separate" or len(self.shared) > 0, f'"{self.kind}" needs shared layers')
        _check(self.experts > 0, f"experts must be > 0, got {self.experts}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The whole dense model and the dims of the tables."""

    table_dim: int = 32
    """Width of every embedding table."""
    table_init_std: float = 0.02
    """Standard deviation of the tables' start values."""
    dim: int = 32
    """Width of the feature tokens."""
    layers: int = 2
    """Layers; each has sequence blocks, cross modules and an interaction."""
    dense_tokens: int = 2
    """Tokens made of all dense features together."""
    dense_hidden: tuple[int, ...] = ()
    """Hidden layers of the MLP that makes them; none: a linear map."""
    stream: StreamConfig = field(default_factory=StreamConfig)
    """Every stream that `streams` does not name."""
    streams: dict[str, StreamConfig] = field(default_factory=dict)
    """Streams with sizes of their own, by name."""
    interaction: InteractionConfig = field(default_factory=InteractionConfig)
    """The interaction of each layer."""
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    """The task heads."""
    norm: NormKind = "layer"
    """Kind of all norms."""
    norm_affine: bool = False
    """Learned weights in norms: costly, and of almost no effect in the published models."""
    bias: bool = False
    """Biases in linear layers other than the last."""
    compute: Compute = "float32"
    """Dtype of activations and matrix products. Parameters, their gradients, moments and what ranks add up stay float32
    with "bfloat16" too, and so do the statistics of norms, rotary angles, the last layer of each head, and the loss."""
    compile: tuple[CompiledPart, ...] = ()
    """Parts that torch.compile makes kernels of: "features" (their first tokens), "interaction" (of every layer),
    "heads". Results differ by rounding; the first steps take tens of seconds longer. Parameters keep their names."""
    graphs: tuple[GraphedPart, ...] = ()
    """Parts of fixed shape that CUDA replays as graphs, forward and backward, one launch each instead of dozens:
    "summaries" (but for their attention), "interaction", "heads". Training batches of another number of rows, and
    evaluation, run as without. CUDA only; parallel.shard and parallel.expert 1, no accumulation, no balance.budget, no
    data whose rows are requests."""
    attention: AttentionImpl = "eager"
    """Implementation of attention."""
    hstu: HstuImpl = "layers"
    """What stands around the attention of an "hstu" block. "layers": PyTorch's layers, which may have norm weights and
    biases. "eager", "triton", "reference": `gem_attention.block_api.hstu_block` of that name, on the same parameters;
    "triton" fuses norm, projection and rotary, and gate and norm. They take no norm weights and no biases."""
    hstu_recompute: tuple[HstuRecompute, ...] = ()
    """What "hstu" blocks do not keep for the backward but work out again, as `gem_attention.interface.RecomputeSpec`
    names it; results stay the same bits. Not with hstu "layers"."""

    def __post_init__(self) -> None:
        _check(self.table_dim > 0 and self.table_dim % 4 == 0, f"table_dim={self.table_dim}: a multiple of 4, > 0")
        _check(self.dim > 0 and self.dim % 2 == 0, f"dim={self.dim}: must be even and > 0")
        _check(self.layers > 0, f"layers must be > 0, got {self.layers}")
        _check(self.dense_tokens > 0, f"dense_tokens must be > 0, got {self.dense_tokens}")
        _check(len(set(self.compile)) == len(self.compile), f"compile: parts repeat in {self.compile}")
        _check(len(set(self.graphs)) == len(self.graphs), f"graphs: parts repeat in {self.graphs}")
        fused = self.hstu != "layers"
        for name, on in (("norm_affine", self.norm_affine), ("bias", self.bias)):
            _check(not (fused and on), f'hstu="{self.hstu}" has no place for {name}=True: use hstu="layers"')
        _check(
            fused or not self.hstu_recompute, f'hstu_recompute={self.hstu_recompute!r} needs another hstu than "layers"'
        )
        for name, stream in {"(default)": self.stream, **self.streams}.items():
            _check(
                0 < len(stream.blocks) <= self.layers,
                f"stream {name}: {len(stream.blocks)} blocks, expected 1 to layers={self.layers}",
            )

    def stream_for(self, name: str) -> StreamConfig:
        """The config of stream `name`."""
        return self.streams.get(name, self.stream)
