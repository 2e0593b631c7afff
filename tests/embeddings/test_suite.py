"""The conformance suite against tables that say something wrong of themselves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from gem_embeddings.interface import Replicas
from gem_embeddings.reference import ReferenceTables
from gem_embeddings.testing import (
    OPTIMIZER,
    SEED,
    SPECS,
    Quirks,
    check_copies,
    check_exchange,
    check_lookups,
    check_managed,
    check_policies,
    check_shared,
    check_state,
    check_told,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Wrong(ReferenceTables):
    """Reference tables with some answers changed: name -> f(the true answer, ...)."""

    def __init__(self, specs, answers, **options):
        super().__init__(specs, **options)
        for name, change in answers.items():
            true = getattr(self, name)
            setattr(self, name, lambda *arguments, true=true, change=change: change(true, *arguments))


def factory_of(answers):
    def factory(specs, optimizer, seed, **options):
        return Wrong(specs, answers, optimizer=optimizer, seed=seed, **options)

    return factory


def without(name):
    """The answer without one of its entries."""
    return lambda true: {key: value for key, value in true().items() if key != name}


def deeper(change):
    """The answer with each inner dict changed."""
    return lambda true: {key: change(dict(value)) for key, value in true().items()}


TOLD = {
    "placement": without("shop"),
    "state_shapes": deeper(lambda shapes: {**shapes, "momentum": (1,)}),
    "copied_parts": lambda true: {"item.weight": None},
    "policy_counts": lambda true: {"item": {"ids": 3, "outside": 0}},
    "id_state": lambda true: {"item": {}},
    "id_shapes": lambda true: {"item": {}},
    "load_id_state": lambda true, state: None,
}
POLICIES = {
    "policy_counts": deeper(lambda counts: {**counts, "outside": counts["outside"] + 1}),
    "forward": lambda true, ids: {key: vectors + 1e-3 for key, vectors in true(ids).items()},
}
MANAGED = {
    "policy_counts": deeper(lambda counts: {**counts, "evicted": 0}),
    "id_state": deeper(lambda parts: {key: part.int() for key, part in parts.items()}),
    "id_shapes": without("tag"),
    "load_id_state": lambda true, state: None if "tag" in state else true(state),
}


@pytest.mark.parametrize(
    ("check", "name", "answer"),
    [
        *((check_told, name, answer) for name, answer in TOLD.items()),
        *((check_policies, name, answer) for name, answer in POLICIES.items()),
        *((check_managed, name, answer) for name, answer in MANAGED.items()),
    ],
)
def test_a_wrong_answer_is_seen(check, name, answer):
    with pytest.raises(AssertionError):
        check(factory_of({name: answer}), Quirks())
    check(factory_of({}), Quirks())


def changed(ids, *, values=None, weights=None):
    """A batch with other values or weights."""
    return KeyedJaggedTensor(
        keys=ids.keys(),
        values=ids.values() if values is None else values,
        lengths=ids.lengths(),
        weights=ids.weights_or_none() if weights is None else weights,
    )


class NoWeights(ReferenceTables):
    def prepare(self, ids):
        weights = ids.weights_or_none()
        return super().prepare(ids if weights is None else changed(ids, weights=torch.ones_like(weights)))


class WeightsOfOthers(ReferenceTables):
    """Where ids were dropped, those that are left get each other's weights."""

    def prepare(self, ids):
        prepared = super().prepare(ids)
        if prepared._kept and ids.weights_or_none() is not None:
            prepared._ids = changed(prepared._ids, weights=prepared._ids.weights().roll(1))
        return prepared


class OneTableAFeature(ReferenceTables):
    def __init__(self, specs, **options):
        super().__init__(specs, **options)
        if self._sharing.shared:
            raise NotImplementedError("a feature looks up one table")


class FirstTableOnly(ReferenceTables):
    """The second table of a feature gets no gradient."""

    def look_up(self, prepared):
        out = super().look_up(prepared)
        return {name: vectors.detach() if name == "tags@word" else vectors for name, vectors in out.items()}


class OneBuffer(ReferenceTables):
    """Vectors of one size lie in the same memory, that of the lookup before."""

    def look_up(self, prepared):
        out, kept = super().look_up(prepared), self.__dict__.setdefault("kept", {})
        for name, vectors in out.items():
            vectors.data = kept.setdefault((name, vectors.shape), torch.empty_like(vectors)).copy_(vectors.detach())
        return out


class LiveState(ReferenceTables):
    def table_state(self):
        return {
            name: {key: getattr(table, key) for key in ("weight", "momentum")} for name, table in self.tables.items()
        }


class AdoptsState(ReferenceTables):
    def load_table_state(self, state):
        super().load_table_state(state)
        for name, table in self.tables.items():
            table.weight, table.momentum = state[name]["weight"], state[name]["momentum"]


class LiveMaps(ReferenceTables):
    def id_state(self):
        found = super().id_state()
        return {name: {**found[name], "ids": own.ids_R, "rows": own.rows_R} for name, own in self._managed.maps.items()}


class AdoptsMaps(ReferenceTables):
    def load_id_state(self, state):
        super().load_id_state(state)
        for name, own in self._managed.maps.items():
            own.ids_R, own.rows_R = state[name]["ids"], state[name]["rows"]


class EvaluationsTrain(ReferenceTables):
    """Ids of evaluations are counted towards the next round."""

    def look_up(self, prepared):
        out = super().look_up(prepared)
        if not torch.is_grad_enabled() and self._managed is not None:
            self._managed._due.append(prepared.mapped.trained)
        return out


class LookupsTrain(ReferenceTables):
    """Ids are counted by a lookup, before its backward."""

    def look_up(self, prepared):
        if self._managed is None:
            return super().look_up(prepared)
        self._managed.guard = lambda vectors, mapped: vectors
        out = super().look_up(prepared)
        if torch.is_grad_enabled():
            self._managed._due.append(prepared.mapped.trained)
        return out


class TrainsRow0(ReferenceTables):
    """FBGEMM's default: a dropped single id gives zeros, and its gradient goes to row 0."""

    def look_up(self, prepared):
        kept = prepared._kept.get("item")
        out = super().look_up(prepared)
        if kept is not None and torch.is_grad_enabled():
            ids = torch.zeros(int((~kept).sum()), dtype=torch.int64)
            extra = _row_0(self._anchor, ids, self.tables["item"])
            out["item"] = out["item"].index_add(0, (~kept).nonzero().view(-1), extra - extra.detach())
        return out


def _row_0(anchor, ids, table):
    from gem_embeddings.reference import _LookUp

    return _LookUp.apply(anchor, ids, table)


class MeanOverAll(ReferenceTables):
    """A mean divides by the ids that came, dropped ones too."""

    def __call__(self, ids):
        out = super().__call__(ids)
        if "words" in self._policies._policies:
            came = ids["words"].lengths().clamp(min=1)
            values = ids["words"].values()
            inside = ((values >= 0) & (values < 13)).to(out["words"].dtype)
            row_of = torch.repeat_interleave(torch.arange(len(came)), ids["words"].lengths())
            left = torch.zeros(len(came), dtype=inside.dtype).index_add(0, row_of, inside)
            out["words"] = out["words"] * (left / came)[:, None]
        return out


class ChangesTheBatch(ReferenceTables):
    """Ids outside are overwritten in the caller's memory."""

    def prepare(self, ids):
        prepared = super().prepare(ids)
        if self._policies._policies:
            ids.values().clamp_(min=0)
        return prepared


class LiveCounts(ReferenceTables):
    def policy_counts(self):
        mine = self.__dict__.setdefault("told", {})
        mine.update(super().policy_counts())
        return mine


class NothingCopied(ReferenceTables):
    def copied_parts(self):
        return {}


class OldMaps(ReferenceTables):
    """`copied_parts` shows the maps as they were at first."""

    def copied_parts(self):
        return self.__dict__.setdefault("first", {name: part.clone() for name, part in super().copied_parts().items()})


class NoMaps(ReferenceTables):
    def copied_parts(self):
        return {name: torch.zeros_like(part) for name, part in super().copied_parts().items()}


FAULTS = [
    (NoWeights, check_shared, "tags@tag, row"),
    (OneTableAFeature, check_shared, "looks up one table"),
    (FirstTableOnly, check_shared, "word weight: error"),
    (OneBuffer, check_lookups, "after a step and another lookup"),
    (LiveState, check_state, "training changed a state that was saved"),
    (AdoptsState, check_state, "training changed a state that was loaded"),
    (LiveMaps, check_managed, "training changed a map that was saved|evaluations"),
    (AdoptsMaps, check_managed, "training changed a map that was loaded"),
    (EvaluationsTrain, check_managed, "^evaluations"),
    (LookupsTrain, check_managed, "^evaluations, and a lookup without a backward"),
    (NothingCopied, check_managed, "expected the maps"),
    (OldMaps, check_managed, "copied_parts of tables with the same maps"),
    (NoMaps, check_managed, "copied_parts is the same after rounds"),
    (WeightsOfOthers, check_policies, "tag weight: error"),
    (TrainsRow0, check_policies, "item weight: error"),
    (MeanOverAll, check_policies, "words without its dropped ids"),
    (ChangesTheBatch, check_policies, "the lookup changed the batch"),
    (LiveCounts, check_policies, "counts that were told before changed"),
]


@pytest.mark.parametrize(("fault", "check", "words"), FAULTS)
def test_a_planted_fault_is_seen_by_the_check_for_it(fault, check, words):
    def factory(specs, optimizer, seed, **options):
        return fault(specs, optimizer=optimizer, seed=seed, **options)

    with pytest.raises((AssertionError, NotImplementedError), match=words):
        check(factory, Quirks())


class InCopy(ReferenceTables):
    """Says that it holds table "shop" in copy, in two pieces."""

    def copied_parts(self):
        table = self.tables["shop"]
        return {"shop.0": table.weight[:, :2], "shop.1": table.weight[:, 2:], "shop.m": table.momentum}


@pytest.mark.parametrize(
    ("kind", "copied", "words"),
    [
        (InCopy, ("shop",), None),
        (InCopy, (), r"shows 35 numbers .* tables \(\) have 0"),
        (ReferenceTables, ("shop",), r"shows 0 numbers"),
        (LiveState, (), None),
    ],
)
def test_what_is_held_in_copy_is_compared(kind, copied, words):
    def factory(specs, optimizer, seed):
        return kind(specs, optimizer=optimizer, seed=seed)

    if words is None:
        check_told(factory, Quirks(copied=copied))
    else:
        with pytest.raises(AssertionError, match=words):
            check_told(factory, Quirks(copied=copied))


def played(other, size=2):
    """The exchange of the first rank; `other(x)` is what the second gives."""
    return SimpleNamespace(rank=0, size=size, all_gather=lambda x: torch.cat([x, other(x)]))


def other_moments(x):
    """Another lowest byte of moments, one a row: 7 of 4 bytes are as long as 4 of 8; names stay."""
    return x + (x.numel() == 4)


@pytest.mark.parametrize(
    ("kind", "other", "words"),
    [
        (InCopy, lambda x: x, None),
        (InCopy, other_moments, "shop.m differs between copies"),
        (InCopy, lambda x: x + 1, "has other names"),
        (ReferenceTables, lambda x: x, "is empty"),
    ],
)
def test_copies_are_compared(kind, other, words):
    replicas = Replicas(exchange=played(other), sync="average")
    tables = kind(SPECS, optimizer=OPTIMIZER, seed=SEED)
    if words is None:
        check_copies(tables, replicas, world=played(lambda x: x))
    else:
        with pytest.raises(AssertionError, match=words):
            check_copies(tables, replicas, world=played(lambda x: x))


NAN, NEGATIVE = torch.tensor([float("nan"), 1.0]), torch.tensor([-0.0, 1.0])
PARTS = {"nan": NAN, "zero": NEGATIVE, "none": torch.zeros(0, 4), "flag": torch.tensor([True]), "half": NAN.half()}


def shows(parts):
    return SimpleNamespace(copied_parts=lambda: parts)


def compare_in_threads(every, copies, **options):
    """check_copies on ranks that show `every` of these, copies (0, 1, ..) being consecutive; what each rank raised."""
    shard, meeting, came = len(every) // copies, threading.Barrier(len(every), timeout=5), {}

    def exchange(ranks, rank, barrier):
        def all_gather(x):
            came[rank] = x.clone()
            barrier.wait()
            found = torch.cat([came[other] for other in ranks])
            barrier.wait()
            return found

        return SimpleNamespace(rank=ranks.index(rank), size=len(ranks), all_gather=all_gather)

    barriers = [threading.Barrier(copies, timeout=5) for _ in range(shard)]

    def work(rank):
        ranks = range(rank % shard, len(every), shard)
        replicas = Replicas(exchange=exchange(ranks, rank, barriers[rank % shard]))
        world = exchange(range(len(every)), rank, meeting)
        try:
            check_copies(shows(every[rank]), replicas, world=world, **options)
        except AssertionError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(every)) as pool:
        return list(pool.map(work, range(len(every))))


def test_a_rank_without_a_table_has_nothing_in_copy():
    assert compare_in_threads([PARTS, {}] * 2, 2) == [""] * 4
    assert compare_in_threads([PARTS, {}, {}], 1) == [""] * 3


@pytest.mark.parametrize(
    ("every", "words"),
    [
        ([{}, {}, {}, {}], ["is empty on all"] * 4),
        ([PARTS, {}, {}, {}], ["has other names", "of other ranks"] * 2),
        ([PARTS, PARTS, PARTS, {**PARTS, "zero": -NEGATIVE}], ["of other ranks", "zero differs"] * 2),
        ([PARTS, PARTS, {**PARTS, "zero": NEGATIVE.abs()}, PARTS], ["zero differs", "of other ranks"] * 2),
        ([PARTS, PARTS, {**PARTS, "none": torch.zeros(1, 4)}, PARTS], ["has other names", "of other ranks"] * 2),
        ([PARTS, PARTS, {**PARTS, "half": NAN}, PARTS], ["has other names", "of other ranks"] * 2),
    ],
)
def test_copies_are_compared_by_their_bits_and_all_ranks_are_told(every, words):
    found = compare_in_threads(every, 2)
    assert all(word in text for word, text in zip(words, found, strict=True)), found


def test_slices_are_not_in_copy():
    fully = Replicas(exchange=played(lambda x: x), fully_sharded=True)
    check_copies(shows({}), fully, world=played(lambda x: x))


def test_an_exchange_that_adds_nothing_is_seen():
    class Alone:
        rank, size = 1, 2

        def all_gather(self, x):
            return torch.cat([x, x])  # its own rows twice

        def begin(self, kind, x):
            return SimpleNamespace(wait=lambda: self.all_gather(x))

    with pytest.raises(AssertionError, match="all_gather of 2 rows"):
        check_exchange(Alone())
