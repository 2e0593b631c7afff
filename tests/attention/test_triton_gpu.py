"""The shipped suite on a GPU, for the Triton and the Gluon kernels."""

from functools import partial

import pytest
import torch
from gem_attention import api
from gem_attention.testing import Quirks, conformance

pytestmark = pytest.mark.gpu


TRITON = Quirks(dtypes=(torch.bfloat16, torch.float16), device="cuda")


def _gluon_refuses(case):
    spec = case.spec
    if spec.activation == "softmax" or spec.bias is not None or spec.divisor == "per_token":
        return "pointwise activations, no bias, a constant divisor"
    if spec.query == "broadcast" or case.kv_index is not None:
        return "no broadcast queries, no shared rows of keys"
    if case.qk_dim != case.v_dim:
        return "one head dim for q, k and v"
    return "rows that are not the innermost but one in memory" if case.strided == "permuted" else None


GLUON = Quirks(dtypes=(torch.bfloat16,), device="cuda", head_dims=(128,), refuses=_gluon_refuses)


@pytest.mark.parametrize("check", conformance(TRITON), ids=str)
def test_triton_conforms(check):
    check(partial(api.attention, impl="triton"))


@pytest.mark.parametrize("check", conformance(GLUON), ids=str)
def test_gluon_conforms(check):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernels are for compute capability 9.0")
    check(partial(api.attention, impl="gluon"))
