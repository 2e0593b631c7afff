"""torch.compile without graph breaks, and the operators behind it examined by torch.library.opcheck."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from gem_attention import api, eager_op
from gem_attention.testing import Quirks, cases, conformance, make_inputs, run_case

BY_NAME = {case.name: case for case in cases()}
NAMES = ["silu-all-nvidia", "softmax-bias-inside_scale", "gelu-per-token-broadcast", "silu-shared-cross", "silu-tail"]


@pytest.mark.parametrize("name", NAMES)
def test_compiled_in_one_graph_with_gradients(name):
    torch._dynamo.reset()
    case = BY_NAME[name]
    inputs = make_inputs(case, torch.float64)
    run = partial(api.attention, impl="eager")
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    plain, traced = run_case(run, case, inputs), run_case(compiled, case, inputs)
    for key, tensor in plain.tensors().items():
        torch.testing.assert_close(traced.tensors()[key], tensor, rtol=1e-13, atol=1e-15)


def test_other_lengths_do_not_compile_again():
    torch._dynamo.reset()
    case = BY_NAME["silu-causal"]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(api.attention, impl="eager"), fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for lengths in ((3, 9), (4, 5, 6), (12, 1, 7, 2), (5, 5)):
        changed = replace(case, q_lengths=lengths)
        run_case(compiled, changed, make_inputs(changed, torch.float32))
        graphs.append(counter.frame_count)
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 4


@pytest.mark.parametrize("name", ["silu-all-nvidia", "softmax-bias-inside_scale", "gelu-per-token-broadcast"])
def test_opcheck(name):
    case = BY_NAME[name]
    inputs = make_inputs(case, torch.float32)
    layout = inputs.layout

    def leaf(x):
        return None if x is None else x.clone().requires_grad_()

    arguments = (
        *(leaf(x) for x in (inputs.q, inputs.k, inputs.v, inputs.position_table, inputs.time_table)),
        inputs.divisor,
        None if layout.q_offsets is layout.k_offsets else layout.q_offsets,
        layout.k_offsets,
        *(layout.num_targets, layout.num_context, layout.kv_index, layout.timestamps),
        *(layout.batch_size, layout.total_q, layout.total_k, layout.max_q_len, layout.max_k_len),
        case.spec.to_text(),
    )
    torch.library.opcheck(eager_op.eager_forward, arguments)


NO_ISOLATION = conformance(Quirks(dtypes=(torch.float32,), isolates_nan=False))


@pytest.mark.parametrize("check", [check for check in NO_ISOLATION if check.skipped is None], ids=str)
def test_the_operator_and_its_written_gradient_conform(check):
    check(eager_op.attention)


def test_the_reference_says_why_it_does_not_compile():
    torch._dynamo.reset()
    case = BY_NAME["silu-causal"]
    compiled = torch.compile(partial(api.attention, impl="reference"), backend="eager")
    with pytest.raises(Exception, match="a compiler cannot trace its loop over samples; use impl='eager'"):
        run_case(compiled, case, make_inputs(case, torch.float32))
