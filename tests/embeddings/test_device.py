"""The conformance suite keeps to the device it is told, shown without a GPU.

`PretendDevice` runs everything on the CPU but remembers which tensors lie on "cuda:0", says so when asked, and refuses
what CUDA refuses: an operation over tensors of both devices, unless the one on the CPU is a single number.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from gem_embeddings import testing
from gem_embeddings.reference import ReferenceTables
from gem_embeddings.testing import CHECKS, Quirks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

GPU = torch.device("cuda:0")
MOVES = (torch.Tensor.copy_, torch.Tensor.__setitem__, torch.Tensor.__getitem__, torch.Tensor.index_copy_)


class PretendDevice(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, weakref.ref] = {}
        self.operations = 0

    def is_there(self, tensor: torch.Tensor) -> bool:
        found = self._there.get(id(tensor))
        return found is not None and found() is tensor

    def _place(self, out, there: bool):
        for tensor in (leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            if there:
                self._there[id(tensor)] = weakref.ref(tensor)
            else:
                self._there.pop(id(tensor), None)
        return out

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = any(self.is_there(tensor) for tensor in tensors)
        if func == torch.Tensor.device.__get__:
            return GPU if there else torch.device("cpu")
        if func == torch.Tensor.is_cuda.__get__:
            return there
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            return self._move(func, args, kwargs, there)
        if tensors and func not in MOVES:
            apart = [t for t in tensors if not self.is_there(t) and t.dim() > 0]
            if there and apart:
                raise RuntimeError(f"Expected all tensors to be on the same device: {func} got both")
        self.operations += there
        device = kwargs.get("device")
        if device is not None:
            there = torch.device(device).type == "cuda"
            kwargs["device"] = "cpu"
        elif func in MOVES:
            there = self.is_there(args[0])
        return self._place(func(*args, **kwargs), there)

    def _move(self, func, args, kwargs, there):
        wanted = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, str | torch.device)]
        other = [a for a in args[1:] if isinstance(a, torch.Tensor)]
        if func is torch.Tensor.cpu:
            to = False
        elif wanted:
            to = torch.device(wanted[0]).type == "cuda"
        else:
            to = self.is_there(other[0]) if other else there
        args = [torch.device("cpu") if isinstance(a, str | torch.device) else a for a in args]
        kwargs = {k: torch.device("cpu") if isinstance(v, str | torch.device) else v for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        return self._place(out.view_as(out) if out is args[0] and to != there else out, to)


@pytest.fixture(autouse=True)
def no_streams(monkeypatch):
    """TorchRec waits for the stream of a device before it reads from it."""
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)


def factory(specs, optimizer, seed):
    return ReferenceTables(specs, optimizer=optimizer, seed=seed, device="cuda:0", alone=True)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_check_keeps_to_its_device(check):
    with PretendDevice() as pretend:
        check(factory, Quirks(device="cuda:0"))
    assert pretend.operations > 5, "nothing was computed on the device"


def test_the_ranks_check_keeps_to_its_device():
    with PretendDevice():
        testing.check_ranks(factory, Quirks(device="cuda:0"), 0, 1)


def test_the_pretended_device_refuses_a_mixture():
    with PretendDevice():
        a = torch.ones(3).to("cuda:0")
        assert a.device == GPU
        assert (a + torch.tensor(1.0)).device == GPU
        assert a.cpu().device.type == "cpu"
        with pytest.raises(RuntimeError, match="same device"):
            a + torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(3).repeat_interleave(torch.tensor([1, 0, 2], device="cuda:0"))
