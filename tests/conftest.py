"""What every test file may rely on: no process group is left over from the file before."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much the reliability procedures do, and from which seed."""
    group = parser.getgroup("reliability")
    group.addoption("--full", action="store_true", help="the full counts of the procedures in tests/reliability")
    group.addoption("--share", type=int, default=1, help="with --full: one of so many slices of the full counts")
    group.addoption("--seed", type=int, default=None, help="seed of their random choices (default: a new one, printed)")


_SEED = random.SystemRandom().randrange(2**32)  # another one every session, unless --seed says which


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[..., int]:
    """count(fast=200, full_count=10_000) -> how many tries this session makes; --share 10 makes 1,000 of
    them (whole=True: a figure that no share divides).
    """
    full, share = bool(request.config.getoption("--full")), int(request.config.getoption("--share"))
    return lambda *, fast, full_count, whole=False: (
        fast if not full else full_count if whole else -(-full_count // share)
    )


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random choices of one procedure; the seed is printed with the test's output, and is a property of its report."""
    given = request.config.getoption("--seed")
    seed = _SEED if given is None else given
    print(f"seed {seed}   (repeat with --seed {seed})")
    request.node.user_properties.append(("seed", seed))
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    """End a process group that a file's tests left; looked up in sys.modules, so that torch is not imported for it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
