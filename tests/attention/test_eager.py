"""What eager promises beyond the suite: neighbours do not matter, groups cover every row, sharing adds nothing."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from gem_attention import grouping
from gem_attention.api import attention, make_layout
from gem_attention.interface import AttentionSpec, MaskSpec
from gem_attention.sharing import without_kv_index
from gem_attention.testing import Case, cases, make_inputs, run_case

BY_NAME = {case.name: case for case in cases()}


@pytest.mark.parametrize("name", ["silu-all-nvidia", "softmax-all-meta", "softmax-none", "silu-bias-inside_scale"])
def test_a_sample_is_the_same_alone_and_in_a_batch(name):
    case = BY_NAME[name]
    inputs = make_inputs(case, torch.float64)
    run = partial(attention, impl="eager", spec=case.spec)
    tables = {"position_table": inputs.position_table, "time_table": inputs.time_table}
    batch = run(inputs.q, inputs.k, inputs.v, layout=inputs.layout, **tables)
    for b, (start, end) in enumerate(itertools.pairwise(inputs.layout.k_offsets.tolist())):
        rows = slice(start, end)
        own = {
            name: t[b : b + 1]
            for name in ("num_targets", "num_context")
            if (t := getattr(inputs.layout, name)) is not None
        }
        times = inputs.layout.timestamps
        alone = make_layout(
            q_offsets=torch.tensor([0, end - start]), timestamps=None if times is None else times[rows], **own
        )
        out = run(inputs.q[rows], inputs.k[rows], inputs.v[rows], layout=alone, **tables)
        torch.testing.assert_close(out, batch[rows], rtol=1e-13, atol=1e-14)


def test_padding_does_not_depend_on_how_samples_are_grouped(monkeypatch):
    case = BY_NAME["silu-all-nvidia"]
    inputs = make_inputs(case, torch.float64)
    results, groups = [], []
    for padding, pairs in ((0, 10**6), (10**6, 10**6), (10**6, 40)):
        monkeypatch.setattr(grouping, "PADDING_PAIRS", padding)
        monkeypatch.setattr(grouping, "GROUP_PAIRS", pairs)
        fresh = replace(inputs, layout=replace(inputs.layout, q_offsets=inputs.layout.k_offsets))
        groups.append(len(grouping.make_plan(fresh.layout).groups))
        results.append(run_case(partial(attention, impl="eager"), case, fresh))
    assert groups == [6, 1, 5]
    for other in results[1:]:
        for name, tensor in results[0].tensors().items():
            torch.testing.assert_close(other.tensors()[name], tensor, rtol=1e-12, atol=1e-13)


def test_groups_hold_every_sample_with_work_once():
    lengths = [5, 0, 200, 199, 1, 64, 3, 64, 0, 17]
    plan = grouping.make_plan(make_layout(q_offsets=torch.tensor([0, *itertools.accumulate(lengths)])))
    members = [b for group in plan.groups for b in group.samples.tolist()]
    assert sorted(members) == [b for b, n in enumerate(lengths) if n]
    rows = torch.cat([r.flatten() for r in plan.q_rows])
    assert sorted(rows[rows >= 0].tolist()) == list(range(sum(lengths)))
    padded = sum(group.size * group.queries * group.keys for group in plan.groups)
    exact = sum(n * n for n in lengths)
    assert exact <= padded <= exact + len(plan.groups) * grouping.PADDING_PAIRS


def test_a_plan_is_made_once_a_layout_and_goes_with_it():
    layout = make_layout(q_offsets=torch.tensor([0, 4, 9]))
    q = torch.randn(9, 2, 8)
    spec = AttentionSpec(activation="silu", scale=1.0, mask=MaskSpec(causal=True))
    attention(q, q, q, spec=spec, layout=layout, impl="eager")
    plan = grouping.plan_for(layout)
    masks = plan.masks[spec.mask]
    attention(q, q, q, spec=spec, layout=layout, impl="eager")
    assert grouping.plan_for(layout) is plan
    assert plan.masks[spec.mask] is masks
    before = len(grouping._plans)
    del layout
    assert len(grouping._plans) == before - 1


@pytest.mark.parametrize("name", ["silu-shared-cross", "softmax-shared-broadcast"])
def test_sharing_equals_copies_of_keys_and_values(name):
    case: Case = BY_NAME[name]
    inputs = make_inputs(case, torch.float64)
    offsets = inputs.layout.k_offsets.tolist()
    rows = [torch.arange(offsets[r], offsets[r + 1]) for r in case.kv_index]
    index = torch.cat(rows)
    lengths = [len(r) for r in rows]
    copied = make_layout(q_offsets=inputs.layout.q_offsets, k_offsets=torch.tensor([0, *itertools.accumulate(lengths)]))
    run = partial(attention, spec=case.spec, impl="eager")
    shared = run(inputs.q, inputs.k, inputs.v, layout=inputs.layout)
    torch.testing.assert_close(
        shared, run(inputs.q, inputs.k[index], inputs.v[index], layout=copied), rtol=1e-13, atol=1e-14
    )


def test_sharing_by_hand():
    layout = make_layout(
        q_offsets=torch.tensor([0, 2, 5, 6]), k_offsets=torch.tensor([0, 4, 4, 9]), kv_index=torch.tensor([0, 0, 2])
    )
    assert without_kv_index(layout).q_offsets.tolist() == [0, 5, 5, 6]


def test_gradients_of_gradients_where_activations_have_them():
    spec = AttentionSpec(activation="softmax", scale=0.7, mask=MaskSpec(causal=True))
    layout = make_layout(q_offsets=torch.tensor([0, 3, 3, 5]))
    generator = torch.Generator().manual_seed(0)
    qkv = tuple(torch.randn(5, 2, 3, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3))
    run = partial(attention, spec=spec, layout=layout, impl="eager")
    assert torch.autograd.gradcheck(run, qkv)
    assert torch.autograd.gradgradcheck(run, qkv)


def test_auto_says_once_what_it_chose(caplog):
    from gem_attention import api

    api._announced.clear()
    q = torch.randn(4, 1, 8)
    spec = AttentionSpec(activation="silu", scale=1.0)
    layout = make_layout(q_offsets=torch.tensor([0, 4]))
    with caplog.at_level("INFO", logger="gem_attention.api"):
        first = attention(q, q, q, spec=spec, layout=layout)
        attention(q, q, q, spec=spec, layout=layout)
    assert [record.message for record in caplog.records] == ["attention on cpu: impl='eager'"]
    assert torch.equal(first, attention(q, q, q, spec=spec, layout=layout, impl="eager"))
