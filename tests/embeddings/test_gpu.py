"""Tables on a GPU: the conformance suite on the device, and with tables in host memory behind a cache."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gem_embeddings import testing
from gem_embeddings.api import build_tables
from gem_embeddings.testing import CHECKS, Quirks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def factory_of(cache_share):
    def factory(specs, optimizer, seed):
        return build_tables(specs, optimizer=optimizer, seed=seed, device="cuda:0", cache_share=cache_share)

    return factory


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("cache_share", [None, 0.3])
def test_conformance(one_process, check, cache_share):
    check(factory_of(cache_share), Quirks(device="cuda:0"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_ranks_check(one_process):
    testing.check_ranks(factory_of(None), Quirks(device="cuda:0"), 0, 1)
