"""The block's kernels on a GPU against float64, by the shipped suite."""

import pytest
import torch
from gem_attention.block_testing import BlockQuirks, conformance, named

pytestmark = pytest.mark.gpu


TRITON = BlockQuirks(dtypes=(torch.bfloat16, torch.float16, torch.float32), device="cuda")


@pytest.mark.parametrize("check", conformance(TRITON), ids=str)
def test_conforms(check):
    check(named("triton"))
