"""Config: types, unknown keys, overrides, JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from gem_pipelines.config import FREE_ON_RESUME, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from gem_pipelines.config_codec import flatten, from_json, to_json
from gem_pipelines.config_overrides import apply_overrides
from gem_pipelines.errors import ConfigError
from gem_pipelines.recipes import RECIPES, find_recipe


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_go_through_json_unchanged(name):
    config = find_recipe(name)
    assert config.name == name
    assert from_json(RunConfig, json.loads(json.dumps(to_json(config)))) == config


def test_config_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        find_recipe("debug").name = "other"
    with pytest.raises(TypeError):
        DataConfig("ml-100k")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(steps=True), r"train\.steps is True \(bool\), expected int or None"),
        (lambda: DataConfig(shuffle=1), r"data\.shuffle is 1 \(int\), expected bool"),
        (lambda: OptimizerConfig(lr=False), r"optimizer\.lr is False"),
        (lambda: OptimizerConfig(lr=float("nan")), r"optimizer\.lr is nan \(float\), expected float, finite"),
        (lambda: OptimizerConfig(betas=(0.9,)), r"optimizer\.betas"),
        (lambda: OptimizerConfig(schedule="linear"), r"optimizer\.schedule is 'linear'.*'constant', 'cosine'"),
        (lambda: DataConfig(global_batch_size=0), r"data\.global_batch_size is 0, expected at least 1"),
        (lambda: DataConfig(readers=-1), r"data\.readers is -1, expected at least 0"),
        (lambda: DataConfig(readers=2, prefetch=0), r"data\.readers is 2, expected 0 or 1 with data\.prefetch 0"),
        (lambda: TrainConfig(device="tpu"), r"train\.device is 'tpu'"),
        (lambda: dataclasses.replace(find_recipe("debug"), name=3), r"name is 3"),
    ],
)
def test_wrong_values_name_the_key(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_types_inside_the_model_are_checked_too():
    config = find_recipe("debug")
    with pytest.raises(ConfigError, match=r"model\.dense_tokens is True \(bool\), expected int"):
        dataclasses.replace(config, model=dataclasses.replace(config.model, dense_tokens=True))


def test_json_with_an_unknown_key_is_refused():
    value = to_json(find_recipe("debug"))
    value["optimizer"]["lrr"] = 1.0
    with pytest.raises(ConfigError, match=r"unknown config key 'optimizer\.lrr'; did you mean 'lr'"):
        from_json(RunConfig, value)


def test_overrides_change_what_they_name_and_nothing_else():
    config = find_recipe("debug")
    first = ["--optimizer.lr", "2e-3", "--train.steps=7", "--data.shuffle", "False"]
    second = [
        "--optimizer.max-grad-norm",
        "None",
        "--model.stream.blocks",
        "hstu",
        "pffn",
        "--train.task-weights",
        "1",
        "2",
    ]
    changed = apply_overrides(apply_overrides(config, first), second)
    before, after = flatten(config), flatten(changed)
    assert {key: after[key] for key in after if after[key] != before[key]} == {
        "optimizer.lr": 2e-3,
        "optimizer.max_grad_norm": None,
        "train.steps": 7,
        "train.task_weights": (1.0, 2.0),
        "data.shuffle": False,
        "model.stream.blocks": ("hstu", "pffn"),
    }


@pytest.mark.parametrize("arguments", [["--data.shuffle", "false"], ["--data.shuffle=FALSE"], ["--data.shuffle=False"]])
def test_booleans_in_any_spelling(arguments):
    changed = apply_overrides(find_recipe("debug"), [*arguments, "--name", "true"])
    assert changed.data.shuffle is False
    assert changed.name == "true"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.lrr", "1"], r"unknown config key 'optimizer\.lrr'; did you mean '--optimizer\.lr'"),
        (["--train.lr", "1"], r"unknown config key 'train\.lr'; did you mean '--optimizer\.lr'"),
        (["--optimizer.lr=1", "--modle.dim", "8"], r"unknown config key 'modle\.dim'; did you mean '--model\.dim'"),
        (["--optimizer.lr", "fast"], r"^optimizer\.lr is 'fast', expected float$"),
        (["--train.record-every", "True"], r"^train\.record_every is 'True', expected int$"),
        (["--train.record-every", "1.5"], r"^train\.record_every is '1\.5', expected int$"),
        (["--data.shuffle", "1"], r"--data\.shuffle"),
        (["--optimizer.lr", "-1"], r"optimizer\.lr is -1\.0, expected at least 0"),
        (["--optimizer.schedule", "linear"], r"'linear'.*'constant'"),
        (["extra"], r"unexpected argument 'extra'"),
    ],
)
def test_bad_overrides(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        apply_overrides(find_recipe("debug"), arguments)
    assert "\n" not in str(caught.value)


def test_unknown_recipe():
    with pytest.raises(ConfigError, match="unknown recipe 'debg'; did you mean 'debug'"):
        find_recipe("debg")


def test_free_keys_exist():
    assert set(flatten(find_recipe("debug"))) >= FREE_ON_RESUME
