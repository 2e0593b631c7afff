"""The block's kernels on a GPU against float64, by the shipped suite."""

import pytest
import torch
from gem_attention.block_testing import checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "check", checks(impl="triton", dtypes=(torch.bfloat16, torch.float16, torch.float32), device="cuda"), ids=str
)
def test_conforms(check):
    check()
