"""Time by part with a clock that the model itself turns, and proof that looking changes nothing."""

from __future__ import annotations

import pytest
import torch
from gem_pipelines.timing import PartClock, tensors_in
from torch import nn


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Spend(torch.autograd.Function):
    """Identity that takes `forward_s` seconds forward and `backward_s` backward."""

    @staticmethod
    def forward(ctx, x, time, forward_s, backward_s):
        time.now += forward_s
        ctx.time, ctx.backward_s = time, backward_s
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.time.now += ctx.backward_s
        return grad, None, None, None


class Block(nn.Module):
    def __init__(self, time: FakeTime, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.spend = (time, forward_s, backward_s)

    def forward(self, x):
        return {"out": Spend.apply(x["out"] * self.weight, *self.spend)}


class Skip(nn.Module):
    """A layer that hands its input on."""

    def forward(self, x):
        return x


def test_forward_and_backward_go_to_their_part():
    time = FakeTime()
    first, second, third = Block(time, 1, 3), Block(time, 10, 30), Block(time, 100, 300)
    skip = Skip()
    clock = PartClock(device=torch.device("cpu"), clock=time)
    with clock.watching({"sequence": [first, third], "cross": [second], "heads": [skip]}):
        with clock.part("read"):
            time.now += 0.5
        embeddings = Spend.apply(torch.ones((), requires_grad=True), time, 0, 7)
        clock.mark_backward("tables", {"f": embeddings})
        x = third(skip(second(first({"out": embeddings}))))
        time.now += 0.25
        x["out"].backward()
        with clock.part("optimizer"):
            time.now += 2
    seconds = clock.seconds()
    assert seconds == pytest.approx(
        {
            "read": 0.5,
            "tables": 7,
            "sequence": 404,
            "interaction": 0,
            "cross": 40,
            "heads": 0,
            "optimizer": 2,
            "other": 0.25,
        }
    )
    assert sum(seconds.values()) == pytest.approx(time.now)


def test_hooks_are_gone_afterwards():
    time = FakeTime()
    block = Block(time, 1, 1)
    clock = PartClock(device=torch.device("cpu"), clock=time)
    with clock.watching({"cross": [block]}):
        pass
    block({"out": torch.ones(())})
    assert clock.seconds()["cross"] == 0
    assert not block._forward_hooks
    assert not block._forward_pre_hooks


def test_a_profiled_step_computes_the_same_bits(make_job, state_of):
    states = []
    for name in ("plain", "profiled"):
        job = make_job(name, train={"profile_every": 1 if name == "profiled" else 0})
        job.train(resumed_from=None, survey=None)
        states.append(state_of(job))
        shares = job.throughput.summary()["share_by_part"]
        assert bool(shares) == (name == "profiled")
    assert states[0] == states[1]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert (
        min(shares[part] for part in ("read", "tables", "sequence", "interaction", "cross", "heads", "optimizer")) > 0
    )


def test_tensors_in_nested_values():
    a, b = torch.ones(1), torch.ones(2)
    assert [t.numel() for t in tensors_in({"x": (a, [b, "no"]), "y": None})] == [1, 2]
