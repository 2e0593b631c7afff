"""gem_attention's block call computes what the model's HSTU block computes, so that it can take its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gem_attention.api import attention
from gem_attention.block_api import hstu_block, rotary_table
from gem_attention.interface import HstuSpec, RecomputeSpec
from gem_pipelines.model.common import NORM_EPS
from gem_pipelines.model.hstu import HstuBlock
from gem_pipelines.model.testing import NOW, clicks_plan, make_config, make_inputs, stream_config
from gem_pipelines.model.tokens import pack, rotary_spec


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("recompute", [RecomputeSpec(), RecomputeSpec(normed_x=True, gated=True, projected=True)])
def test_hstu_block_is_the_models(norm, recompute):
    config = replace(make_config(stream=stream_config(window=2)), norm=norm)
    plan = clicks_plan(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = HstuBlock(plan, config).double()
        packed = pack(plan, make_inputs([3, 0, 5]).streams["clicks"], torch.full((3,), NOW), dtype=torch.float64)
        x_TD = torch.randn(packed.plain.total_q, plan.config.dim, dtype=torch.float64, requires_grad=True)
        above = torch.randn(packed.plain.total_q, plan.config.dim, dtype=torch.float64)
    head_dim = plan.config.dim // plan.config.heads
    spec = HstuSpec(
        dim=plan.config.dim,
        heads=plan.config.heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        rotary=rotary_spec(plan),
        norm=norm,
        eps=NORM_EPS,
    )

    def call(q, k, v):
        return attention(q, k, v, spec=block.spec, layout=packed.masked, impl="eager")

    # the model's rows are u, v, [q, k], in the same order
    leaves = (x_TD, block.uvqk.weight, block.out.weight)
    table = rotary_table(packed.angles)
    ours = hstu_block(*leaves, attention=call, spec=spec, table=table, recompute=recompute, impl="eager")
    theirs = block(x_TD, packed)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for a, b in zip(torch.autograd.grad(ours, leaves, above), torch.autograd.grad(theirs, leaves, above), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
