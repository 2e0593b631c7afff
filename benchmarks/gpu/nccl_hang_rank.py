"""One rank of nccl_hang.py. Rank and world come by environment, the packages by PYTHONPATH.

python nccl_hang_rank.py loop DIRECTORY DEVICE FAULT LIMIT_S     steps of two collectives; a fault on rank 1 in step 5
python nccl_hang_rank.py train RUN DEVICE DATA                   a training job; goes on where RUN holds one
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

FAULT_RANK, FAULT_STEP, STEPS = 1, 5, 20
SIZE = 4097  # of the collective on the device, by which it is known in the report
TRAIN_STEPS, SAVE_EVERY = 60, 10
TRAIN_LIMIT_S = 30.0  # train.timeout_s: a rank that is alone waits so long over NCCL, where there is no launcher


def loop(directory: Path, device: str, fault: str, limit_s: float) -> None:
    """As a step of training does: numbers of the host over gloo, then tensors of the device over NCCL, then a wait.

    limit_s  of the watchdog; 0: none, and the process group's own time limit is all there is
    """
    from gem_pipelines.flight import FlightRecorder
    from gem_pipelines.runtime import start_runtime
    from gem_pipelines.watchdog import Watchdog, record_collectives

    record_collectives()
    timeout = timedelta(seconds=120 if limit_s else 10)
    runtime = start_runtime(device=device, threads=1, deterministic=True, timeout=timeout)
    recorder = FlightRecorder(directory / "supervision", rank=runtime.rank, attempt=0)
    watchdog = Watchdog(directory, recorder, rank=runtime.rank, attempt=0, given_s=limit_s, before_s=60.0)
    watchdog.start()
    values = torch.ones(SIZE, device=runtime.device)
    group = None if device == "cuda" else dist.new_group()  # NCCL has connections of its own, so gloo gets some too
    for step in range(1, STEPS + 1):
        watchdog.enter("step", step=step)
        here = step == FAULT_STEP and runtime.rank == FAULT_RANK
        if here:
            (directory / "fault").write_text(str(time.monotonic()))
        runtime.sum(torch.ones(3))
        if here and fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if here and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if not (here and fault == "skip"):
            dist.all_reduce(values, group=group)
            values /= runtime.world_size
        assert values.sum().item() == SIZE  # waits for the device
    watchdog.stop()
    runtime.close()


def train(run: Path, device: str, data: Path) -> None:
    """`gemline train --auto-resume` of the debug recipe on prepared data, without the command line."""
    from gem_pipelines.job import Request
    from gem_pipelines.job import run as run_job
    from gem_pipelines.recipes.debug import debug

    recipe = debug()
    config = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, source=str(data), options=()),
        train=dataclasses.replace(
            recipe.train,
            **{"device": device, "steps": TRAIN_STEPS, "checkpoint_every": SAVE_EVERY, "keep_checkpoints": 9},
            **{"survey_rows": 0, "profile_every": 0, "tensorboard": False, "peak_flops_per_s": 1e12, "ledger": True},
            **{"restart_limit": 50, "print_every": 1000, "timeout_s": TRAIN_LIMIT_S},
        ),
    )
    run_job(Request(config=config, run_dir=run, resume=False, command="nccl_hang.py", automatic=True))


def main() -> int:
    if sys.argv[1] == "loop":
        loop(Path(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5]))
    else:
        train(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
