"""Peer copies on two GPUs of one host: the conformance suite, growth of the buffer, many in flight."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("gpu_worker.py")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices of one host")
def test_peer_copies(run_ranks):
    settings = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"} | os.environ
    run_ranks(WORKER, 2, env=settings)
