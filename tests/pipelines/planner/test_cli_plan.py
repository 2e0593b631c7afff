"""gemline plan, from the command line down."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
import torch
from gem_pipelines.cli import main
from gem_pipelines.model.build import build_model
from gem_pipelines.model.flops import training_flops
from gem_pipelines.model.testing import make_config, make_schema
from gem_pipelines.planner.recipe import _typical
from gem_pipelines.planner.shapes import saved_bytes


def test_words(capsys):
    assert main(["plan", "--topology", "h200_cluster", "--recipe", "gem_like_1t", "--world", "256"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Which rank sits where",
        "table_shard",
        "Step time",
        "Chosen of",
        "runner-up",
        "Predictions of a model",
    ):
        assert words in out
    assert "assumed" in out


def test_recipe_on_its_data(tmp_path, capsys, monkeypatch):
    """The debug recipe: JSON with bytes, and a picture with every rank."""
    monkeypatch.chdir(tmp_path)
    arguments = ["plan", "--topology", "laptop", "--recipe", "debug", "--world", "4", "--json", "--picture", "p.svg"]
    assert main([*arguments, "--mesh", "shard=2,replicate=2,table_shard=4", "--data.global_batch_size", "32"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out[out.index("{") :])
    assert found["chosen"]["mesh"]["shard"] == 2
    assert found["layout"]["groups"]["replicate"] == [[0, 2], [1, 3]]
    assert set(found["chosen"]["bytes_by_axis"]) == {"shard_expert", "replicate", "table_shard"}
    texts = [e.text for e in ET.parse(tmp_path / "p.svg").iter() if e.text]
    assert any("debug on 4 ranks of laptop: shard 2, replicate 2, table_shard 4" in text for text in texts)
    assert {"0", "1", "2", "3"} <= set(texts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "debug", "--world", "2"], "--topology"),
        (["--topology", "laptop", "--recipe", "debgu", "--world", "2"], "did you mean 'debug'?"),
        (["--topology", "laptop", "--recipe", "gem_like_1t"], "--world is missing"),
        (["--topology", "laptop", "--recipe", "debgu"], "did you mean 'debug'?"),
        (["--topology", "latpop", "--recipe", "gem_like_1t", "--world", "2"], "did you mean 'laptop'?"),
        (
            ["--topology", "laptop", "--recipe", "gem_like_1t", "--world", "8", "--mesh", "shard=4,table_shard=8"],
            "both products must be 8",
        ),
        (
            ["--topology", "laptop", "--recipe", "gem_like_1t", "--world", "8", "--optimizer.lr", "1"],
            "no configuration",
        ),
        (["--topology", "laptop", "--recipe", "gem_like_1t", "--world", "8", "--picture", "x.gif"], ".svg or .png"),
        (["--topology", "laptop", "--recipe", "gem_like_1t", "--world", "8", "--sync-every", "0"], "--sync-every is 0"),
    ],
)
def test_mistakes(arguments, words, capsys):
    assert main(["plan", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_typical_lengths_follow_the_quantiles():
    described = {"quantiles": {"0.0": 0, "0.5": 8, "1.0": 16}}
    assert _typical(described) == [1, 3, 5, 7, 9, 11, 13, 15]


def test_saved_bytes_are_those_of_a_known_graph():
    """A linear layer saves its input; counted once, although two layers read it."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(4, 2, bias=False)

        def forward(self, inputs):
            x = inputs.dense
            return self.a(x).sum() + self.b(x).sum()

    schema = make_schema()
    wide = type(schema)(**{**vars(schema), "dense": ("a", "b", "c", "d")})
    lengths = {"clicks": [1, 2], "views": [0, 1]}
    assert saved_bytes(Two(), wide, make_config(), lengths) == 2 * 4 * 4


def test_saved_bytes_grow_with_the_events():
    schema, config = make_schema(), make_config()
    model = build_model(schema, config, seed=0)
    few, many = ({"clicks": [n] * 4, "views": [1] * 4} for n in (2, 8))
    assert saved_bytes(model, schema, config, many) > saved_bytes(model, schema, config, few)
    assert sum(training_flops(config, schema, many).values()) > sum(training_flops(config, schema, few).values())
