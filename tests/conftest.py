"""What every test file may rely on: options of the procedures, ranks as processes, and no process group left over from
the file before.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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


RUN_RANK = Path(__file__).with_name("run_rank.py")


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """run_ranks(worker, world_size, *arguments, timeout_s=240, env=None): the ranks of a test, see run_rank.py.

    AssertionError with what each rank wrote on standard error where one fails; the others are then given five seconds.
    """

    def run(worker: Path, world_size: int, *arguments: str, timeout_s: float = 240, env: dict | None = None) -> None:
        folder = tmp_path_factory.mktemp("ranks")
        command = [sys.executable, str(RUN_RANK), str(worker)]
        ranks = []
        for rank in range(world_size):
            numbers = (str(rank), str(world_size), str(folder / "store"))
            with open(folder / f"rank-{rank}.txt", "w") as errors:
                ranks.append(subprocess.Popen([*command, *numbers, *arguments], stderr=errors, env=env or os.environ))
        deadline = time.monotonic() + timeout_s
        try:
            while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
                if any(process.returncode for process in ranks):
                    deadline = min(deadline, time.monotonic() + 5)
                time.sleep(0.05)
        finally:
            codes = [process.poll() for process in ranks]  # None: stopped here
            for process in ranks:
                process.kill()
                process.wait()
        said = [f"rank {rank}, exit code {code}:\n" for rank, code in enumerate(codes)]
        texts = [(folder / f"rank-{rank}.txt").read_text()[-3000:] for rank in range(world_size)]
        assert codes == [0] * world_size, "\n".join(a + b for a, b in zip(said, texts, strict=True))

    return run


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    """End a process group that a file's tests left; looked up in sys.modules, so that torch is not imported for it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
