"""S5, S6: strangers at the port where the ranks meet do not change a run; what the environment knows is not written.

Gemline opens no port of its own and sends no pickles. The port is that of torch's store: it listens on all interfaces
and knows no password, so it belongs behind a firewall. What is shown here: bytes that are no request, connections that
say nothing, and a client that speaks the store's language and writes keys of its own, leave losses and states as they
are, to the bit, or the job ends with a code that is not 0 and the next start goes on as if nothing had been.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from super_jobs import digests, losses
from test_super_kill import arguments

WORLD, STEPS = 2, 60

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def straight(zygote, debug_data, tmp_path_factory):
    run = tmp_path_factory.mktemp("straight") / "run"
    pids = zygote.start(arguments(run, debug_data, STEPS, beside=True), world=WORLD, output=run.parent / "out")
    assert zygote.wait(pids, seconds=100) == [0] * WORLD, (run.parent / "out").read_text()[-3000:]
    return losses(run), digests(run)


def connect(port):
    for _ in range(400):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=1)
        time.sleep(0.01)
    pytest.fail(f"nobody listens on port {port}")


def say_nonsense(port, rng, clients):
    for _ in range(clients):
        with contextlib.suppress(OSError), connect(port) as stranger:
            stranger.sendall(rng.randbytes(rng.choice([1, 8, 64, 4096])))
        time.sleep(rng.uniform(0, 0.05))


def say_nothing(port, rng, clients):
    held = [connect(port) for _ in range(clients)]
    time.sleep(1)
    for stranger in held:
        stranger.close()


def write_keys(port, rng, clients):
    """A client of torch's own store, with keys that nobody asked for, and one that ranks use while they meet."""
    for number in range(clients):
        with contextlib.suppress(RuntimeError, OSError):
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
            store.set(f"stranger/{number}", rng.randbytes(100).hex())
            store.add("stranger/count", 1)


STRANGERS = {"nonsense": (say_nonsense, 40, 40), "silence": (say_nothing, 100, 900), "keys": (write_keys, 10, 40)}


@pytest.mark.parametrize("kind", STRANGERS)
def test_s5_strangers_at_the_port(zygote, debug_data, straight, rng, count, counted, kind, tmp_path):
    visit, fast, full = STRANGERS[kind]
    run, output, clients = tmp_path / "run", tmp_path / "out", count(fast=fast, full_count=full)
    command = arguments(run, debug_data, STEPS, beside=True)
    pids = zygote.start(command, world=WORLD, output=output)
    strangers = threading.Thread(target=visit, args=(zygote.port, rng, clients))
    strangers.start()
    codes = zygote.wait(pids, seconds=100)
    strangers.join(60)
    assert not strangers.is_alive()
    assert None not in codes, output.read_text()[-3000:]
    if codes != [0] * WORLD:
        assert 0 not in codes
        assert re.search(r"gemline( rank \d)?: error|Traceback", output.read_text())
        assert zygote.wait(zygote.start(command, world=WORLD, output=output), seconds=100) == [0] * WORLD
    assert (losses(run), digests(run)) == straight
    counted(f"{kind}: clients", f"{clients}, codes {codes}")


def test_s6_what_the_environment_knows_is_not_written(zygote, debug_data, tmp_path):
    """A job that hangs, leaves stacks, is started again and writes its report, with a secret in its environment."""
    secret = "sk-5f0c2e7a91"
    run, output = tmp_path / "run", tmp_path / "out"
    command = [*arguments(run, debug_data, 20, beside=True), "--train.hang-limit-s", "2", "--train.report", "True"]
    for fault in ({1: {"name": "sleep", "step": 7}}, None):
        settings = {"AWS_SECRET_ACCESS_KEY": secret, "SOME_TOKEN": secret}
        pids = zygote.start(command, world=WORLD, output=output, faults=fault, environment=settings)
        codes = zygote.wait(pids, seconds=60)
        assert (codes == [0] * WORLD) == (fault is None), output.read_text()[-3000:]
    assert (run / "hang").is_dir()
    assert (run / "report.html").exists()
    files = [path for path in [output, *run.rglob("*")] if path.is_file()]
    assert len(files) > 15
    assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []
