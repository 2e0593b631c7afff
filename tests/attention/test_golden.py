"""The shipped test vectors: written by today's reference, read without pickle, and they bite."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from gem_attention import api, golden
from gem_attention.interface import AttentionSpec


def test_the_file_is_what_the_reference_says_today():
    errors = golden.check(partial(api.attention, impl="reference"))
    assert len(errors) == 39
    assert max(errors.values()) < 1e-13


def test_eager_agrees_with_the_file():
    assert max(golden.check(partial(api.attention, impl="eager")).values()) < 1e-13


def test_a_wrong_scale_shows_in_every_case():
    def wrong(q, k, v, *, spec, **more):
        return api.attention(q, k, v, spec=replace(spec, scale=spec.scale * 1.001), impl="eager", **more)

    assert min(golden.check(wrong).values()) > 1e-7


def test_the_file_is_small_and_holds_no_pickle():
    assert golden.PATH.stat().st_size < 100_000
    with np.load(golden.PATH, allow_pickle=False) as file:
        for name in file.files:
            assert file[name].dtype != object


def test_writing_it_twice_gives_the_same_bytes(tmp_path):
    golden.write(tmp_path / "a.npz")
    golden.write(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_every_meaning_is_there():
    specs = [spec for spec, _ in golden.read().values()]
    assert {spec.activation for spec in specs} == {
        "softmax", "silu", "gelu", "gelu_tanh", "gelu_poly", "relu", "relu2", "identity",
    }  # fmt: skip
    assert {spec.query for spec in specs} == {"self", "cross", "broadcast", "tail"}
    assert {spec.mask.semantics for spec in specs} == {None, "meta", "nvidia"}
    assert {spec.bias.where for spec in specs if spec.bias} == {"inside_scale", "outside_scale"}


def test_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "INTERFACE_VERSION", (0, 9))
    golden.write(tmp_path / "old.npz")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"version \[0, 9\], this package has"):
        golden.read(tmp_path / "old.npz")


def test_specs_survive_json():
    spec, tensors = golden.read()["silu-bias-inside_scale"]
    assert isinstance(spec, AttentionSpec)
    assert spec.bias.time.count == tensors["time_table"].shape[1]
    assert tensors["expected/out"].dtype == torch.float64
