"""Each block against a loop over samples and tokens, and its gradients against finite differences."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from gem_attention.rotary import apply_rotary
from gem_pipelines.model.common import Gate, Mlp, TokenMix
from gem_pipelines.model.config import InteractionConfig
from gem_pipelines.model.dhen import MEMBERS, Dhen
from gem_pipelines.model.heads import TaskHeads
from gem_pipelines.model.hstu import HstuBlock
from gem_pipelines.model.interformer import FeatureSummary, InterFormerBlock, InterFormerSummary
from gem_pipelines.model.kunlun import GdpaPffn, HspSummary, SeedPooling, SelfAttention, SumKronLinear
from gem_pipelines.model.testing import KINDS, NOW, clicks_plan, make_config, make_inputs, stream_config
from gem_pipelines.model.tokens import EventTokens, pack, rotary_spec, split_and_turn, time_gaps, with_table
from gem_pipelines.model.wukong import FactorizationMachineBlock, Wukong, WukongExperts, split_evenly
from torch.autograd import gradcheck

CLICKS = [3, 0, 5]
EPS = 1e-6


def prepare(block_class, config, *, seed=0):
    """(block in float64, plan, packed, x (T, D), weight tokens (B, W, D)) for rows of CLICKS events."""
    plan = clicks_plan(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = block_class(plan, config).double()
        packed = pack(plan, make_inputs(CLICKS).streams["clicks"], torch.full((3,), NOW), dtype=torch.float64)
        x_TD = torch.randn(packed.plain.total_q, plan.config.dim, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(3, plan.config.weight_tokens, plan.config.dim, dtype=torch.float64, requires_grad=True)
    return block, plan, packed, x_TD, weights


def rows_of(packed, x):
    """Row by row."""
    return [x[a:b] for a, b in itertools.pairwise(packed.offsets.tolist())]


def norm(x):
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)  # (H, n, K)


def turned(x, packed, plan):
    """(T, D) -> the same, each head turned by the packed angles."""
    spec = rotary_spec(plan)
    return apply_rotary(x.unflatten(-1, (plan.config.heads, -1)), packed.angles, spec).flatten(-2)


def turned_rows(packed, plan, q_TD, k_TD, v_TD):
    """q, k (turned) and v of each row."""
    parts = (turned(q_TD, packed, plan), turned(k_TD, packed, plan), v_TD)
    return zip(*(rows_of(packed, part) for part in parts), strict=True)


def assert_close(came, expected):
    torch.testing.assert_close(came, expected, rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------- sequence blocks against loops


@pytest.mark.parametrize("stream", [{}, {"window": 2}, {"score_divisor": 3.0}], ids=["plain", "window", "divisor"])
def test_hstu_is_its_formula(stream):
    block, plan, packed, x_TD, _ = prepare(HstuBlock, make_config(stream=stream_config(**stream)))
    u_TD, v_TD, q_TD, k_TD = (norm(x_TD) @ block.uvqk.weight.T).chunk(4, dim=-1)
    rows = []
    for q, k, v in turned_rows(packed, plan, q_TD, k_TD, v_TD):
        q, k, v = (heads_of(part, 2) for part in (q, k, v))
        n = q.shape[1]
        gap = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        seen = (gap >= 0) & ((gap <= plan.config.window) if plan.config.window else True)
        scores = F.silu(q @ k.transpose(1, 2) * 4**-0.5) * seen
        rows.append((scores @ v / (stream.get("score_divisor") or 13)).transpose(0, 1).flatten(1))
    expected = x_TD + (F.silu(u_TD) * norm(torch.cat(rows))) @ block.out.weight.T
    assert_close(block(x_TD, packed), expected)


def test_pffn_is_its_formula():
    block, _, packed, x_TD, weights = prepare(GdpaPffn, make_config(stream=stream_config(blocks=("pffn", "pffn"))))
    rows = []
    for row, own in zip(rows_of(packed, x_TD), weights, strict=True):
        q, k, v = (heads_of(part, 2) for part in (norm(row), own @ block.keys.weight.T, own @ block.values.weight.T))
        rows.append(row + (F.gelu(q @ k.transpose(1, 2) / 13) @ v).transpose(0, 1).flatten(1))
    assert_close(block(x_TD, packed, weights), torch.cat(rows))


def test_window_attention_is_its_formula():
    block, plan, packed, x_TD, _ = prepare(SelfAttention, make_config(stream=stream_config(window=1)))
    q_TD, k_TD, v_TD = (norm(x_TD) @ block.qkv.weight.T).chunk(3, dim=-1)
    rows = []
    for q, k, v in turned_rows(packed, plan, q_TD, k_TD, v_TD):
        q, k, v = (heads_of(part, 2) for part in (q, k, v))
        n = q.shape[1]
        far = (torch.arange(n)[:, None] - torch.arange(n)[None, :]).abs() > 1
        scores = (q @ k.transpose(1, 2) * 4**-0.5).masked_fill(far, -torch.inf)
        rows.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    assert_close(block(x_TD, packed), x_TD + torch.cat(rows) @ block.out.weight.T)


def test_interformer_block_is_pffn_then_attention():
    config = make_config(stream=stream_config(blocks=("interformer", "interformer")))
    block, _, packed, x_TD, weights = prepare(InterFormerBlock, config)
    expected = block.attention(block.feed_forward(x_TD, packed, weights), packed)
    assert_close(block(x_TD, packed, weights), expected)
    assert not torch.allclose(expected, block.attention(x_TD, packed))


def test_sum_kron_linear_is_a_sum_of_two_sided_products():
    module = SumKronLinear(5, 2, 4, terms=3).double()
    h_BSD = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = sum(z.T @ h_BSD @ w for z, w in zip(module.z_ISN, module.w_IDD, strict=True))
    assert_close(module(h_BSD), expected)


def test_seed_pooling_and_hsp_are_their_formulas():
    config = make_config(stream=stream_config(summary="hsp"))
    block, _, packed, x_TD, _ = prepare(HspSummary, config)
    pool, rows = block.pool, []
    q = heads_of(norm(pool.seeds_SD) @ pool.queries.weight.T, 2)
    for row in rows_of(packed, x_TD):
        k, v = (heads_of(part, 2) for part in (norm(row) @ pool.keys_values.weight.T).chunk(2, dim=-1))
        rows.append(((q @ k.transpose(1, 2) * 4**-0.5).softmax(-1) @ v).transpose(0, 1).flatten(1))
    pooled = torch.stack(rows) @ pool.out.weight.T
    last = torch.stack([row[-1] for row in rows_of(packed, x_TD)])
    assert_close(block(x_TD, packed), torch.cat([block.compress(pooled), last[:, None]], dim=1))


def test_interformer_summary_takes_cls_pooled_recent_and_candidate():
    block, _, packed, x_TD, _ = prepare(
        InterFormerSummary, make_config(stream=stream_config(cls_tokens=1, recent_tokens=2))
    )
    pooled, rows = block.pool(x_TD, packed), []
    for row, seeds in zip(rows_of(packed, x_TD), pooled, strict=True):
        events = row[1:-1].flip(0)
        recent = torch.cat([events[:2], torch.zeros(2 - min(2, len(events)), 8, dtype=torch.float64)])
        rows.append(torch.cat([row[:1], seeds, recent, row[-1:]]))
    z = torch.stack(rows)
    assert_close(block(x_TD, packed), z * torch.sigmoid(z @ block.gate.gate.weight.T))


def test_a_row_without_tokens_pools_to_zero():
    block, plan, _, _, _ = prepare(SeedPooling, make_config(stream=stream_config(candidate=False)))
    packed = pack(plan, make_inputs(CLICKS).streams["clicks"], torch.full((3,), NOW), dtype=torch.float64)
    out = block(torch.randn(8, 8, dtype=torch.float64), packed)
    assert not out[1].any()
    assert out[0].any()
    assert out[2].any()


# ---------------------------------------------------------------- tokens


def test_packing_is_the_documented_example():
    plan = clicks_plan(make_config(stream=stream_config(cls_tokens=1, recent_tokens=1)))
    packed = pack(plan, make_inputs([2, 0]).streams["clicks"], torch.full((2,), NOW), dtype=torch.float64)
    assert packed.offsets.tolist() == [0, 4, 6]
    assert packed.order.tolist() == [0, 2, 3, 4, 1, 5]
    assert packed.target.tolist() == [3, 5]
    assert packed.recent[0].tolist() == [2]
    assert packed.is_recent.tolist() == [[True], [False]]
    assert packed.masked.num_context.tolist() == [1, 1]
    assert packed.masked.num_targets.tolist() == [1, 1]


def test_angles_follow_position_and_age():
    """One context token (age 0, position 0), events at positions 1 and 2, the candidate (age 0) at position 3."""
    plan = clicks_plan(make_config(stream=stream_config(cls_tokens=1)))
    stream = make_inputs([2]).streams["clicks"]
    stream.times.copy_(torch.tensor([NOW - 3600, NOW - 10]))
    packed = pack(plan, stream, torch.tensor([NOW]), dtype=torch.float64)
    ages = torch.tensor([0.0, 3600.0, 10.0, 0.0], dtype=torch.float64)
    spec = rotary_spec(plan)
    slow = torch.tensor([0, -0.5], dtype=torch.float64)  # pairs 0 and 1 of a head of 4
    expected = torch.arange(4)[:, None] * spec.base**slow + torch.log1p(ages / 60)[:, None] * spec.time_base**slow
    assert_close(packed.angles, expected)


def test_time_gaps_are_the_documented_example():
    stream = make_inputs([2]).streams["clicks"]
    stream.times.copy_(torch.tensor([90, 99]))
    expected = torch.tensor([[11.0, 1.0], [2.0, 10.0]]).log() / 10
    torch.testing.assert_close(time_gaps(stream, torch.tensor([100])), expected)


def test_an_event_is_the_sum_of_its_fields_bits_and_gaps():
    config = make_config()
    block, _, _, _, _ = prepare(EventTokens, config)
    inputs = make_inputs([2, 1])
    inputs.streams["clicks"].actions.copy_(torch.tensor([0b101, 0b000, 0b010]))
    events, candidates = block(inputs)
    item, tag = block.fields.weight[:, :4], block.fields.weight[:, 4:]
    bits = block.actions.weight.T
    gaps = time_gaps(inputs.streams["clicks"], inputs.timestamps).double() @ block.gaps.weight.T
    vectors = inputs.embeddings["clicks.item"] @ item.T + inputs.embeddings["clicks.tag"] @ tag.T
    assert_close(events, vectors + gaps + torch.stack([bits[0] + bits[2], 0 * bits[0], bits[1]]))
    # "tag" is a table of a list, not of a scalar: the candidate is known by its item only.
    assert_close(candidates, inputs.embeddings["item"] @ item.T + block.is_candidate_D)


# ---------------------------------------------------------------- interactions and heads


def test_factorization_machine_is_x_xt_y():
    block = FactorizationMachineBlock(4, 2, make_config()).double()
    x_BND = torch.randn(3, 4, 6, dtype=torch.float64)
    products = x_BND @ x_BND.transpose(1, 2) @ block.y_NR
    assert_close(block(x_BND), block.mlp(norm(products.flatten(1))).view(3, 2, 6))


def test_wukong_is_norm_of_blocks_plus_residual():
    x_BND = torch.randn(3, 4, 6, dtype=torch.float64)
    same = Wukong(4, make_config(), fm_tokens=2, linear_tokens=2).double()
    assert_close(same(x_BND), norm(torch.cat([same.fmb(x_BND), same.lcb.weight_MN @ x_BND], dim=1) + x_BND))
    other = Wukong(4, make_config(), fm_tokens=1, linear_tokens=2).double()
    blocks = torch.cat([other.fmb(x_BND), other.lcb(x_BND)], dim=1)
    assert_close(other(x_BND), norm(blocks + other.residual.weight_MN @ x_BND))


def test_experts_see_their_part_only():
    config = make_config(interaction=InteractionConfig(kind="experts", fm_tokens=2, linear_tokens=2, rank=2, experts=2))
    module = WukongExperts(5, config).double()
    x_BND = torch.randn(3, 5, 6, dtype=torch.float64)
    changed = x_BND.clone()
    changed[:, 3:] += 1
    first, second = module(x_BND), module(changed)
    assert torch.equal(first[:, :2], second[:, :2])
    assert not torch.allclose(first[:, 2:], second[:, 2:])
    assert split_evenly(7, 3) == [3, 2, 2]
    with pytest.raises(ValueError, match="fewer experts"):
        split_evenly(1, 2)


def test_dhen_sums_its_members():
    config = make_config(
        interaction=InteractionConfig(kind="dhen", members=tuple(MEMBERS), fm_tokens=2, linear_tokens=1, rank=2)
    )
    module = Dhen(4, config).double()
    x_BND = torch.randn(3, 4, 6, dtype=torch.float64)
    total = sum(member(x_BND) for member in module.members.values()) + module.shortcut(x_BND)
    assert_close(module(x_BND), norm(total))
    cross = module.members["dcn"]
    flat = x_BND.flatten(1)
    crossed = (flat * (flat @ cross.down.weight.T @ cross.up.weight.T) + flat).view(3, 4, 6)
    assert_close(cross(x_BND), cross.mix.weight_MN @ crossed)


def test_mmoe_mixes_experts_by_task():
    config = make_config(heads=make_config().heads.__class__(kind="mmoe", shared=(7,), hidden=(5,), experts=3))
    heads = TaskHeads(9, ("a", "b"), config).double()
    x_BC = torch.randn(4, 9, dtype=torch.float64)
    experts = torch.stack([F.gelu(expert(x_BC)) for expert in heads.experts])
    for task, gate in enumerate(heads.gates):
        share = (x_BC @ gate.weight.T).softmax(-1)
        mixed = sum(share[:, i : i + 1] * experts[i] for i in range(3))
        assert_close(heads(x_BC)[:, task], heads.tasks[task](mixed)[:, 0])


# ---------------------------------------------------------------- gradients

SEQUENCE = {
    "hstu": (HstuBlock, {}),
    "hstu_context": (HstuBlock, {"cls_tokens": 1, "window": 2}),
    "pffn": (GdpaPffn, {"blocks": ("pffn", "pffn")}),
    "window": (SelfAttention, {"window": 1}),
    "interformer": (InterFormerBlock, {"blocks": ("interformer",) * 2}),
}


@pytest.mark.parametrize("name", SEQUENCE)
def test_gradients_of_sequence_blocks(name):
    block_class, stream = SEQUENCE[name]
    block, _, packed, x_TD, weights = prepare(block_class, make_config(stream=stream_config(**stream)))
    parameters = dict(block.named_parameters())

    def run(x, w, *values):
        return torch.func.functional_call(block, dict(zip(parameters, values, strict=True)), (x, packed, w))

    assert gradcheck(run, (x_TD, weights, *parameters.values()), fast_mode=True)


@pytest.mark.parametrize("block_class", [HspSummary, InterFormerSummary])
def test_gradients_of_summaries(block_class):
    block, _, packed, x_TD, _ = prepare(block_class, make_config(stream=stream_config(summary="hsp", cls_tokens=1)))
    parameters = dict(block.named_parameters())

    def run(x, *values):
        return torch.func.functional_call(block, dict(zip(parameters, values, strict=True)), (x, packed))

    assert gradcheck(run, (x_TD, *parameters.values()), fast_mode=True)


DENSE = {
    "wukong": lambda: Wukong(3, make_config(), fm_tokens=1, linear_tokens=1),
    "experts": lambda: WukongExperts(3, make_config(interaction=InteractionConfig(kind="experts", rank=2))),
    "dhen": lambda: Dhen(3, make_config(interaction=InteractionConfig(kind="dhen", members=tuple(MEMBERS), rank=2))),
    "feature_summary": lambda: FeatureSummary(3, 2, clicks_plan(make_config()), make_config()),
    "gate": lambda: Gate(6),
    "mix": lambda: TokenMix(3, 2),
    "mlp": lambda: Mlp((6, 5, 4), bias=True),
}


@pytest.mark.parametrize("name", DENSE)
def test_gradients_of_dense_modules(name):
    torch.manual_seed(0)
    module = DENSE[name]().double()
    parameters = dict(module.named_parameters())
    x_BND = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def run(x, *values):
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x,))

    assert gradcheck(run, (x_BND, *parameters.values()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_turning_by_a_table_is_the_rotary_embedding(dtype):
    """Forward and backward against gem_attention's definition; in bfloat16 to the bit but for one rounding."""
    plan = clicks_plan(KINDS["hstu"])
    packed = pack(plan, make_inputs(CLICKS).streams["clicks"], torch.full((3,), NOW), dtype=torch.float32)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    packed = dataclasses.replace(packed, angles=packed.angles.to(wide))
    width = 2 * plan.config.dim
    x = torch.randn(packed.plain.total_q, width, dtype=dtype, generator=torch.Generator().manual_seed(0))
    found = []
    for one in (packed, with_table(packed, fused=False)):
        leaf = x.clone().requires_grad_()
        q, k = split_and_turn(leaf, plan.config.heads, one, rotary_spec(plan))
        (q.double() * 2 + k.double() ** 2).sum().backward()
        found.append((q.detach(), k.detach(), leaf.grad))
    assert not torch.equal(found[0][0].flatten(1), x[:, : plan.config.dim])
    rtol = 1e-12 if dtype == torch.float64 else 2**-7
    for expected, got in zip(*found, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)
