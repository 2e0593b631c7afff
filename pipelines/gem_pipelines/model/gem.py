"""`GemModel`: sequence, cross and interaction layers interleaved, then task heads. Maths only: no mesh, no loss.

One layer, in the order of Kunlun (both arches read the layer's input, so neither waits for the other):

    X_sum_s = FeatureSummary(X)             for each stream s whose block makes weights from the features
    H_s     = Summary(S_s) or the cached    what the features see of the stream
    X'      = Interaction([X | H_1 | H_2 ...])
    S_s'    = Block(S_s, X_sum_s)

and after the last layer the heads read [X | H of the last sequences], as InterFormer's output does. Where a stream has
a target read, its token stands beside H throughout.

Where rows are requests, streams have R rows and all else has B, the impressions (requests.py).

Letters: B rows, N tokens, D width of the features, T packed tokens of a stream.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem_pipelines.model.common import linear, make_norm
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.dhen import Dhen
from gem_pipelines.model.heads import TaskHeads
from gem_pipelines.model.hstu import HstuBlock
from gem_pipelines.model.inputs import ModelInput
from gem_pipelines.model.interformer import FeatureSummary, InterFormerBlock, InterFormerSummary
from gem_pipelines.model.kunlun import GdpaPffn, HspSummary, SelfAttention
from gem_pipelines.model.plan import ModelPlan, StreamPlan
from gem_pipelines.model.repeat import repeat
from gem_pipelines.model.requests import pack_view, view_of_stream
from gem_pipelines.model.target_read import TargetRead
from gem_pipelines.model.tokens import EventTokens, FeatureTokens, Packed, with_table
from gem_pipelines.model.wukong import Wukong, WukongExperts

NEEDS_WEIGHTS = ("pffn", "interformer")


class Summary(nn.Module):
    """A stream's tokens as tokens of the interaction: (T, stream width) -> (B, summary tokens, D)."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = HspSummary(plan, config) if plan.config.summary == "hsp" else InterFormerSummary(plan, config)
        self.has_target = plan.targets > 0
        self.norm = make_norm(plan.config.dim, kind=config.norm, affine=config.norm_affine)
        self.project = linear(plan.config.dim, config.dim, bias=config.bias)

    def forward(self, x_TD: Tensor, packed: Packed) -> Tensor:
        found = self.finish(*self.tokens.parts(x_TD, packed))
        # With a candidate the parts are an impression's; without, everything is the request's to here.
        return found if packed.requests is None or self.has_target else repeat(found, packed.requests)

    def finish(self, *parts: Tensor) -> Tensor:
        """What follows the part that depends on the rows' lengths."""
        return self.project(self.norm(self.tokens.join(*parts)))


class Start(nn.Module):
    """One stream's first tokens, packed: [CLS from the features | events | candidate]."""

    def __init__(self, plan: StreamPlan, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = EventTokens(plan, config)

    def forward(self, inputs: ModelInput, context_BCD: Tensor | None, packed: Packed) -> Tensor:
        events_ND, candidates_BD = self.tokens(inputs)
        parts = [events_ND, candidates_BD]
        if context_BCD is not None:
            parts.insert(0, context_BCD.flatten(0, 1))
        return torch.cat(parts)[packed.order]


class Layer(nn.Module):
    """One interleaved layer; `index` is its number."""

    def __init__(self, index: int, plan: ModelPlan, config: ModelConfig) -> None:
        super().__init__()
        self.index = index
        self.streams = plan.streams
        tokens_in = plan.tokens_in[index]
        self.sequence = nn.ModuleDict()
        self.weights = nn.ModuleDict()
        self.summaries = nn.ModuleDict()
        for stream in plan.streams:
            if stream.refreshes(index):
                self.summaries[stream.name] = Summary(stream, config)
            if index < len(stream.config.blocks):
                kind = stream.config.blocks[index]
                self.sequence[stream.name] = make_block(kind, stream, config)
                if kind in NEEDS_WEIGHTS:
                    tokens = stream.config.weight_tokens
                    self.weights[stream.name] = FeatureSummary(tokens_in, tokens, stream, config)
        self.interaction = make_interaction(tokens_in + plan.summary_tokens, config)

    def forward(
        self,
        x_BND: Tensor,
        tokens: dict[str, Tensor],
        cached: dict[str, Tensor],
        packed: dict[str, Packed],
        reads: list[Tensor],
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """(X, stream -> tokens, stream -> summary) before -> the same after. reads: what candidates found."""
        summaries = dict(cached)
        for name, summary in self.summaries.items():
            summaries[name] = summary(tokens[name], packed[name])
        after = dict(tokens)
        for name, block in self.sequence.items():
            weights_BWD = self.weights[name](x_BND) if name in self.weights else None
            after[name] = block(tokens[name], packed[name], weights_BWD)
        seen = [x_BND, *(summaries[stream.name] for stream in self.streams), *reads]
        return self.interaction(torch.cat(seen, dim=1)), after, summaries


class GemModel(nn.Module):
    """ModelInput -> logits (B, tasks), tasks in the order of the schema's labels."""

    def __init__(self, plan: ModelPlan, config: ModelConfig) -> None:
        super().__init__()
        self.plan = plan
        self.compute = config.compute
        self.fused = config.hstu != "layers"
        self.features = FeatureTokens(plan, config)
        self.starts = nn.ModuleDict({stream.name: Start(stream, config) for stream in plan.streams})
        self.contexts = nn.ModuleDict(
            {
                stream.name: FeatureSummary(plan.tokens_in[0], stream.context, stream, config)
                for stream in plan.streams
                if stream.context
            }
        )
        self.reads = nn.ModuleDict({s.name: TargetRead(s, config) for s in plan.streams if s.read_tokens})
        self.layers = nn.ModuleList(Layer(index, plan, config) for index in range(config.layers))
        self.last_summaries = nn.ModuleDict(
            {stream.name: Summary(stream, config) for stream in plan.streams if stream.pools_last(config.layers)}
        )
        self.heads = TaskHeads((plan.tokens_in[-1] + plan.summary_tokens) * config.dim, plan.tasks, config)

    def forward(self, inputs: ModelInput) -> Tensor:
        x_BND = self.features(inputs)
        angles = torch.promote_types(x_BND.dtype, torch.float32)
        views = {stream.name: view_of_stream(inputs, stream) for stream in self.plan.streams}
        packed = {stream.name: pack_view(stream, views[stream.name], dtype=angles) for stream in self.plan.streams}
        packed = {name: with_table(one, fused=self.fused) for name, one in packed.items()}
        tokens = {}
        for name, start in self.starts.items():
            context_BCD = self.contexts[name](x_BND) if name in self.contexts else None
            tokens[name] = start(views[name], context_BCD, packed[name])
        reads = [read(views[name], tokens[name], packed[name]) for name, read in self.reads.items()]
        summaries: dict[str, Tensor] = {}
        for layer in self.layers:
            x_BND, tokens, summaries = layer(x_BND, tokens, summaries, packed, reads)
        for name, summary in self.last_summaries.items():
            summaries[name] = summary(tokens[name], packed[name])
        last_BND = torch.cat([x_BND, *(summaries[stream.name] for stream in self.plan.streams), *reads], dim=1)
        return self.heads(last_BND.flatten(1))

    def parts(self) -> dict[str, list[nn.Module]]:
        """Part -> its modules: every parameter belongs to exactly one module of one part."""
        layers = list(self.layers)
        cross = [module for layer in layers for group in (layer.weights, layer.summaries) for module in group.values()]
        return {
            "sequence": [*self.starts.values(), *(block for layer in layers for block in layer.sequence.values())],
            "cross": [*self.contexts.values(), *self.reads.values(), *cross, *self.last_summaries.values()],
            "interaction": [self.features, *(layer.interaction for layer in layers)],
            "heads": [self.heads],
        }


def make_block(kind: str, plan: StreamPlan, config: ModelConfig) -> nn.Module:
    """The sequence block of that kind."""
    if kind == "hstu":
        return HstuBlock(plan, config)
    if kind == "pffn":
        return GdpaPffn(plan, config)
    if kind == "window":
        return SelfAttention(plan, config)
    assert kind == "interformer", kind
    return InterFormerBlock(plan, config)


def make_interaction(tokens_in: int, config: ModelConfig) -> nn.Module:
    """The interaction of the config's kind: (B, tokens_in, D) -> (B, config.interaction.tokens, D)."""
    own = config.interaction
    if own.kind == "wukong":
        return Wukong(tokens_in, config, fm_tokens=own.fm_tokens, linear_tokens=own.linear_tokens)
    if own.kind == "dhen":
        return Dhen(tokens_in, config)
    return WukongExperts(tokens_in, config)
