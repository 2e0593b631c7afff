"""Exports: what other programs read is what the checkpoint holds; nothing half written, nothing from damaged bytes."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gem_pipelines.checkpoint_export import export
from gem_pipelines.checkpoint_format import Checkpoint, step_directory, write_checkpoint
from gem_pipelines.checkpoint_incremental import Chain
from gem_pipelines.cli import main
from gem_pipelines.errors import CheckpointError
from safetensors.torch import load_file


def checkpoint(step):
    generator = torch.Generator().manual_seed(3)
    weight, momentum = torch.randn(300, 4, generator=generator), torch.rand(300, generator=generator)
    weight[step], momentum[step] = float(step), float(step)
    tensors = {
        "tables.item.weight": weight,
        "tables.item.momentum": momentum,
        "dense.head.weight": torch.randn(3, 5, generator=generator),
        "dense.half": torch.randn(7, generator=generator).bfloat16(),
        "optimizer.head.weight.exp_avg": torch.randn(3, 5, generator=generator),
    }
    return Checkpoint(tensors=tensors, state={"position": {"step": step}}, about={"versions": {}})


@pytest.fixture
def run(tmp_path):
    """A full checkpoint and an incremental one."""
    parent = tmp_path / "checkpoints"
    parent.mkdir()
    chain = Chain(full_every=9)
    assert [chain.write(step_directory(parent, step), checkpoint(step))[1] for step in (1, 2)] == [False, True]
    return tmp_path


@pytest.mark.parametrize("step", [1, 2])
def test_the_export_is_what_the_checkpoint_holds(run, step):
    out = run / "out"
    export(step_directory(run / "checkpoints", step), out)
    expected = checkpoint(step).tensors
    dense = load_file(out / "dense.safetensors")
    assert {f"dense.{name}" for name in dense} == {key for key in expected if key.startswith("dense.")}
    assert all(torch.equal(value, expected[f"dense.{name}"]) for name, value in dense.items())
    assert [path.name for path in (out / "tables").iterdir()] == ["item.parquet"]
    table = pq.read_table(out / "tables" / "item.parquet")
    assert table["row"].to_pylist() == list(range(300))
    weight = np.array(table["weight"].to_pylist(), dtype=np.float32)
    assert weight.tobytes() == expected["tables.item.weight"].numpy().tobytes()
    momentum = table["momentum"].to_numpy()
    assert momentum.tobytes() == expected["tables.item.momentum"].numpy().tobytes()
    assert json.loads((out / "export.json").read_bytes())["position"] == {"step": step}


def test_a_table_with_dynamic_ids_says_which_id_holds_each_row(tmp_path):
    free = 2**63 - 1
    tensors = {
        **{f"tables.{name}.weight": torch.randn(4, 2) for name in ("item", "plain")},
        **{f"tables.{name}.momentum": torch.rand(4) for name in ("item", "plain")},
        "ids.item.ids": torch.tensor([-7, 5_000_000_000, free, free]),
        "ids.item.rows": torch.tensor([2, 0, 1, 3]),
    }
    write_checkpoint(tmp_path / "step-00000001", Checkpoint(tensors=tensors, state={}, about={}))
    export(tmp_path / "step-00000001", tmp_path / "out")
    item, plain = (pq.read_table(tmp_path / "out" / "tables" / f"{name}.parquet") for name in ("item", "plain"))
    assert item["id"].to_pylist() == [5_000_000_000, None, -7, None]
    assert item["id"].type == "int64"
    assert plain.column_names == ["row", "weight", "momentum"]


def test_the_newest_sound_one_is_exported_and_never_over_another(run, capsys):
    assert main(["ckpt", "export", str(run)]) == 1
    path = step_directory(run / "checkpoints", 2) / "state.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert main(["ckpt", "export", str(run), str(run / "out")]) == 0
    shown = capsys.readouterr().out
    assert "step-00000002: DAMAGED, passed over: state.json" in shown
    assert json.loads((run / "out" / "export.json").read_bytes())["position"] == {"step": 1}
    assert main(["ckpt", "export", str(run), str(run / "out")]) == 1
    with pytest.raises(CheckpointError, match="is damaged"):
        export(step_directory(run / "checkpoints", 2), run / "other")
    path = step_directory(run / "checkpoints", 1) / "state.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert main(["ckpt", "export", str(run), str(run / "other")]) == 1
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "out"]


def test_a_full_disk_leaves_nothing(run, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(CheckpointError, match="No space left on device; nothing was exported"):
        export(step_directory(run / "checkpoints", 1), run / "out")
    assert [path.name for path in run.iterdir()] == ["checkpoints"]
    write_checkpoint(step_directory(run / "checkpoints", 3), checkpoint(3))
