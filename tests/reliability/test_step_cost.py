"""What a safe step costs on the mid-size CPU recipe: validation and the check of gradients, at most 2 % of a step."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from gem_pipelines import agreement, data_source
from gem_pipelines import trainer as trainer_module
from gem_pipelines.job import build
from gem_pipelines.recipes import find_recipe
from gem_pipelines.rundir import RunDirectory
from gem_pipelines.timing import PartClock

BOUND = 0.02
STEPS = 20


@pytest.mark.slow
def test_validation_and_gradient_check(runtime, tmp_path, monkeypatch, counted):
    recipe = find_recipe("synthetic_cpu")
    config = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, options=("rows=12000",), cache=str(tmp_path / "cache")),
        train=dataclasses.replace(recipe.train, steps=STEPS + 3, survey_rows=0, peak_flops_per_s=1e9),
    )
    spent = dict.fromkeys(("check_batch", "largest_magnitude"), 0.0)

    def timed(module, name):
        inner = getattr(module, name)

        def call(*arguments, **options):
            begin = time.perf_counter()
            result = inner(*arguments, **options)
            spent[name] += time.perf_counter() - begin
            return result

        monkeypatch.setattr(module, name, call)

    timed(agreement, "check_batch")
    timed(trainer_module, "largest_magnitude")
    data = data_source.data_directory(config.data, runtime=runtime, say=lambda line: None)
    job = build(config, data=data, directory=RunDirectory(tmp_path / "run"), runtime=runtime)
    steps, total = job._steps(), 0.0
    for number in range(STEPS + 3):
        batches = job._read(steps)
        if number == 3:
            spent.update(dict.fromkeys(spent, 0.0))
        begin = time.perf_counter()
        job.trainer.step(batches, clock=PartClock(device=torch.device("cpu")))
        total += (time.perf_counter() - begin) * (number >= 3)
        job.loader.mark_trained(batches[-1])
    shares = {name: seconds / total for name, seconds in spent.items()}
    counted("shares of a step", {name: f"{100 * share:.2f} %" for name, share in shares.items()})
    assert sum(shares.values()) <= BOUND
