"""How the program ends: by its exit code, whatever gloo's threads still hold."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import atexit, sys, threading, time
from datetime import timedelta
from gem_pipelines import cli

def work(arguments, launcher):
    # Two ranks in this process. The second takes part only while the interpreter is taken down (Late.__del__): then
    # the first rank's thread has the last hold on its tensor.
    import torch
    import torch.distributed as dist

    class Late:
        def __del__(self):
            ranks[1].allreduce([torch.zeros(1)])
            time.sleep(2)

    def join(rank):
        ranks[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    ranks, store = {}, dist.HashStore()
    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x = torch.zeros(1)
    x.own = 1
    ranks[0].allreduce([x])
    sys.modules["__main__"].late = Late()
    atexit.register(print, "and atexit")
    print("done", end=" ")
    return 7

cli._dispatch = work
cli.program()
"""


def run(program, **options):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", program], text=True, check=False, **options)


def test_a_thread_of_gloo_does_not_end_the_program():
    done = run(PROGRAM, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "done and atexit\n"), done.stderr


def test_output_that_cannot_be_written_is_a_failure():
    program = "from gem_pipelines.leaving import leave\nprint('a', end='')\nleave(0)"
    with open("/dev/full", "w") as full:
        buffered = os.environ | {"PYTHONUNBUFFERED": ""}
        assert run(program, stdout=full, env=buffered, timeout=60).returncode == 120
