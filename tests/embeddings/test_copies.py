"""Copies of the tables over gloo: exact ways against one process, averages against their definition."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gem_embeddings.api import build_tables
from gem_embeddings.averaged import scaled_optimizer
from gem_embeddings.copies import sum_rows
from gem_embeddings.interface import Replicas, RowWiseAdagrad, TableSpec
from gem_embeddings.reference import rowwise_adagrad_
from gem_embeddings.sliced import Slices


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks(run_ranks, world_size):
    """Everything in copies_worker.py, on 1 x 2 copies, or 2 x 2 and 1 x 4."""
    run_ranks(Path(__file__).with_name("copies_worker.py"), world_size, timeout_s=400)


class Played:
    """An exchange whose other copies are played by a script: `others(x)` gives their tensors."""

    def __init__(self, others, rank=0, size=2):
        self.others, self.rank, self.size = others, rank, size

    def all_gather(self, x):
        parts = list(self.others(x))
        parts.insert(self.rank, x)
        return torch.cat(parts)

    def reduce_scatter(self, x):
        total = x + sum(self.others(x))
        return total.view(self.size, -1)[self.rank].clone()

    def all_reduce(self, x):
        return x + sum(self.others(x))

    def begin(self, kind, x):
        found = self.all_gather(x) if kind == "all_gather" else self.reduce_scatter(x)
        return SimpleNamespace(wait=lambda: found)


def test_the_moment_divided_by_m_is_another_rate_and_epsilon():
    """lr * g / (sqrt(v / M) + eps) is the ordinary step with lr' = lr sqrt(M), eps' = eps sqrt(M), whatever v is."""
    copies, optimizer = 4, RowWiseAdagrad(lr=0.3, eps=0.7)
    scaled = scaled_optimizer(optimizer, Replicas(exchange=Played(None, size=copies), sync="average"))
    assert (scaled.lr, scaled.eps) == pytest.approx((0.6, 1.4))
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    moment = torch.logspace(-6, 3, 6, dtype=torch.float64)
    weight, ordinary = torch.zeros(6, 8, dtype=torch.float64), moment.clone()
    rowwise_adagrad_(weight, ordinary, torch.arange(6), grad, lr=scaled.lr, eps=scaled.eps)
    after = moment + grad.square().mean(1)
    expected = -optimizer.lr * grad / ((after / copies).sqrt() + optimizer.eps)[:, None]
    torch.testing.assert_close(weight, expected, rtol=1e-14, atol=0)
    plain = Replicas(exchange=Played(None, size=copies), sync="average", moment_scaling=False)
    assert scaled_optimizer(optimizer, plain) == optimizer
    assert scaled_optimizer(optimizer, None) == optimizer


def test_sum_rows_is_the_worked_example():
    """Copies touch rows [1, 4] and [4] of one table, nothing and [0] of another."""
    a, b, c, d = (torch.full((2,), float(value)) for value in (1, 2, 3, 4))
    theirs = {
        "counts": torch.tensor([1, 1]),
        "rows": torch.tensor([4, 0]),
        "grads": torch.cat([c, d]),
    }
    answers = iter(theirs.values())
    exchange = Played(lambda x: [next(answers)])
    summed = sum_rows(
        [torch.tensor([1, 4]), torch.tensor([], dtype=torch.int64)], [torch.stack([a, b]), torch.zeros(0, 2)], exchange
    )
    assert summed[0][0].tolist() == [1, 4]
    assert summed[0][1].tolist() == [[1, 1], [5, 5]]
    assert summed[1][0].tolist() == [0]
    assert summed[1][1].tolist() == [[4, 4]]


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_slices_are_rows_and_come_together_again(copies):
    """Tables of 5, 1 and 0 rows over more copies than rows: every row on one rank, padding never seen."""
    generator = torch.Generator().manual_seed(copies)
    tables = [torch.randn(rows, dim, generator=generator) for rows, dim in ((5, 4), (1, 8), (0, 4), (7, 1))]
    made = [Slices(tables, Played(None, rank=rank, size=copies)) for rank in range(copies)]
    for slices in made:
        slices._exchange.others = lambda x, own=slices: [other.flat for other in made if other is not own]
        count = -(-5 // copies)
        mine = tables[0][slices._exchange.rank * count : (slices._exchange.rank + 1) * count]
        assert torch.equal(slices.own[0][: mine.shape[0]], mine)
        whole = [torch.full_like(table, float("nan")) for table in tables]
        slices.gather(whole)
        assert all(torch.equal(a, b) for a, b in zip(whole, tables, strict=True))
    gradients = [[torch.randn(t.shape, generator=generator) for t in tables] for _ in range(copies)]
    total = Slices([sum(parts) for parts in zip(*gradients, strict=True)], Played(None, rank=1, size=copies))
    packed = []
    for own in gradients:
        made[1]._exchange.reduce_scatter = lambda x: packed.append(x) or x[: made[1].flat.numel()]
        made[1].sum(own)
    summed = sum(packed).view(copies, -1)[1]
    torch.testing.assert_close(summed, total.flat)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync": "mean"}, "sync must be one of"),
        ({"every": 0}, "every must be >= 1"),
        ({"every": 2}, "every=1"),
        ({"sync": "average", "every": 2, "fully_sharded": True}, "every=1"),
    ],
)
def test_bad_replicas(options, words):
    specs = [TableSpec(name="one", rows=3, dim=4, features=("x",))]
    replicas = Replicas(exchange=Played(None), **options)
    with pytest.raises(ValueError, match=words):
        build_tables(specs, optimizer=RowWiseAdagrad(), seed=0, replicas=replicas)


def test_the_reference_takes_no_copies():
    specs = [TableSpec(name="one", rows=3, dim=4, features=("x",))]
    with pytest.raises(ValueError, match="give process_group"):
        build_tables(
            specs, optimizer=RowWiseAdagrad(), seed=0, impl="reference", replicas=Replicas(exchange=Played(None))
        )


def _logits(tables, ids):
    batch = _ids(ids)
    return tables(batch)["f"].sum(1)


def _ids(ids):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones_like(ids))


def train_averaged(copies: int, scaling: bool, *, steps: int = 150, rows: int = 64, ids: int = 2000) -> float:
    """Excess log loss after training a planted logit per id with M averaged copies; 1 copy is one process.

    Ids are drawn from a long tail, as in ads: most meet one copy at a time.
    """
    import torch.nn.functional as F
    from gem_embeddings.reference import ReferenceTables
    from gem_embeddings.testing import _average

    generator = torch.Generator().manual_seed(5)
    truth = torch.randn(ids, generator=generator, dtype=torch.float64)
    popularity = 1.0 / torch.arange(10, ids + 10)
    optimizer = RowWiseAdagrad(lr=0.03, eps=1e-8)
    replicas = Replicas(exchange=Played(None, size=copies), sync="average", moment_scaling=scaling)
    spec = TableSpec(name="t", rows=ids, dim=4, features=("f",), init_std=0.0)
    members = [
        ReferenceTables(
            [spec], optimizer=scaled_optimizer(optimizer, replicas), seed=0, alone=True, dtype=torch.float64
        )
        for _ in range(copies)
    ]
    for _ in range(steps):
        drawn = torch.multinomial(popularity, rows, replacement=True, generator=generator)
        labels = torch.bernoulli(torch.sigmoid(truth[drawn]), generator=generator)
        for model, own, y in zip(members, drawn.chunk(copies), labels.chunk(copies), strict=True):
            (F.binary_cross_entropy_with_logits(_logits(model, own), y, reduction="sum") * copies / rows).backward()
        _average(members)
    every = torch.arange(ids)
    with torch.no_grad():
        found = _logits(members[0], every)
    p, best = torch.sigmoid(found), torch.sigmoid(truth)
    gap = F.binary_cross_entropy(p, best, reduction="none") - F.binary_cross_entropy(best, best, reduction="none")
    return float((gap * popularity / popularity.sum()).sum())


@pytest.mark.slow
def test_without_moment_scaling_averaged_copies_learn_less():
    """The ablation: excess loss of one process 0.0473, of 8 averaged copies 0.0692, with scaling 0.0537."""
    one = train_averaged(1, True)
    scaled, plain = train_averaged(8, True), train_averaged(8, False)
    assert plain - one > 3 * abs(scaled - one), (one, scaled, plain)
