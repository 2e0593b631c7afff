"""The conformance suite against tables that say something wrong of themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gem_embeddings.reference import ReferenceTables
from gem_embeddings.testing import (
    Quirks,
    check_exchange,
    check_managed,
    check_policies,
    check_told,
)


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


def test_an_exchange_that_adds_nothing_is_seen():
    class Alone:
        rank, size = 1, 2

        def all_gather(self, x):
            return torch.cat([x, x])  # its own rows twice

        def begin(self, kind, x):
            return SimpleNamespace(wait=lambda: self.all_gather(x))

    with pytest.raises(AssertionError, match="all_gather of 2 rows"):
        check_exchange(Alone())
