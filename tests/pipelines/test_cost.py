"""The cost of a row: counted terms are the counter's figures, files are read strictly, a fit comes from real steps."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gem_data import cost
from gem_data.api import FitError, batch_cost, read_schema
from gem_data.interface import CostModel, CostTerm
from gem_pipelines.cli import main
from gem_pipelines.cli.profile import describe
from gem_pipelines.config import BalanceConfig
from gem_pipelines.cost import batch_loads, cost_terms, flops_cost, load_model, read_cost
from gem_pipelines.cost_fit import Fitted, Measured, _saved_bytes, check_batches, draw_lengths, fit, random_batch
from gem_pipelines.errors import ConfigError
from gem_pipelines.model.config import ModelConfig, StreamConfig
from gem_pipelines.model.flops import training_flops


@pytest.mark.parametrize(
    ("blocks", "window"),
    [
        (("hstu", "hstu"), 0),
        (("hstu", "hstu"), 3),
        (("interformer", "interformer"), 0),
        (("interformer", "interformer"), 3),
        (("pffn", "window"), 3),
    ],
)
def test_counted_costs_are_the_counter(debug_data, blocks, window) -> None:
    schema = read_schema(debug_data)
    stream = StreamConfig(blocks=blocks, window=window)
    config = ModelConfig(layers=2, stream=stream)
    model = flops_cost(schema, config)
    rng = np.random.default_rng(3)
    for rows in (1, 4, 9):
        lengths = {s.name: rng.integers(0, s.max_length + 1, rows) for s in schema.streams}
        counted = sum(training_flops(config, schema, {n: v.tolist() for n, v in lengths.items()}).values())
        # A candidate's mask is no plain window: there the terms are close, not exact.
        exact = not (window and "hstu" in blocks)
        if exact:
            assert batch_cost(model, lengths, rows) == counted
        else:
            assert batch_cost(model, lengths, rows) == pytest.approx(counted, rel=0.02)
    numbers = [model.per_step, model.per_sample, *(term.coefficient for term in model.terms)]
    assert all(number.is_integer() for number in numbers), "sums of loads do not depend on their order"


def test_terms_follow_the_blocks(debug_data) -> None:
    schema = read_schema(debug_data)
    terms = cost_terms(schema, ModelConfig(layers=2, stream=StreamConfig(blocks=("hstu", "window"), window=4)))
    first = [(t.pairs, t.causal, t.window) for t in terms if t.stream == schema.streams[0].name]
    assert first == [(False, True, 0), (True, True, 4), (True, False, 4)]


def test_files_of_coefficients(debug_data, tmp_path) -> None:
    schema = read_schema(debug_data)
    name = schema.streams[0].name
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"time": {"unit": "seconds", "per_sample": 2.0, "terms": [{"stream": name}]}}))
    model = load_model(BalanceConfig(cost=str(path)), schema, ModelConfig())
    batch = random_batch(schema, {s.name: np.array([3, 0]) for s in schema.streams}, seed=0)
    assert batch_loads(model, batch).tolist() == [5.0, 2.0]
    assert set(read_cost(path, schema)) == {"time"}
    for content, message in (
        ("{", "balance.cost is .*cost.json"),
        ("{}", "expected an object with the key 'time'"),
        ('{"time": {"unit": "seconds", "terms": [{"stream": "nope"}]}}', "expected a stream of .* came 'nope'"),
        ('{"time": {"unit": "parsecs"}}', "unit: expected one of"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            load_model(BalanceConfig(cost=str(path)), schema, ModelConfig())


def test_profile_fits_time_and_memory_to_real_steps(debug_data, tmp_path, capsys) -> None:
    out = tmp_path / "cost.json"
    arguments = ["profile", "--fit-cost", "--recipe", "debug", "--data", str(debug_data), "--out", str(out)]
    assert main([*arguments, "--batches", "28", "--repeats", "1", "--data.global-batch-size", "24"]) == 0
    said = capsys.readouterr().out
    assert "error, held out: mean" in said
    assert f"--balance.cost {out}" in said
    found = read_cost(out, read_schema(debug_data))
    assert [found[name].unit for name in ("time", "memory")] == ["seconds", "bytes"]
    content = json.loads(out.read_text())
    # Bytes are counts without noise (but attention on CPUs pads rows into groups, which no term says); step times of a
    # shared machine may be anything.
    assert content["measured"]["errors"]["memory"]["held_out"]["count"] == 7
    assert content["measured"]["errors"]["memory"]["held_out"]["mean"] < 0.1
    assert all(term.coefficient >= 0 for term in found["time"].terms)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what to do: gemline profile --fit-cost"),
        (["--fit-cost"], "--recipe is missing"),
        (["--fit-cost", "--recipe", "debug", "--batches", "0"], "--batches is 0, expected at least 1"),
        (["--fit-cost", "--recipe", "debug", "--batches", "3"], "expected at least"),
    ],
)
def test_what_profile_refuses(arguments, message, capsys, debug_data) -> None:
    assert main(["profile", *arguments, *(["--data", str(debug_data)] if "--recipe" in arguments else [])]) == 1
    assert message in capsys.readouterr().err


def test_profile_refuses_before_it_measures(monkeypatch, capsys, debug_data, tmp_path) -> None:
    """What would be lost after minutes: no place for the file, or fewer batches than unknowns."""
    measured = []
    monkeypatch.setattr("gem_pipelines.cost_fit.measure_steps", lambda *args, **named: measured.append(1) or [])
    arguments = ["profile", "--fit-cost", "--recipe", "debug", "--data", str(debug_data)]
    for more, message in (
        (
            ["--out", str(tmp_path / "none" / "cost.json")],
            "none/cost.json', expected a file in a directory that exists",
        ),
        (["--out", str(tmp_path)], "expected a file in a directory that exists"),
        (["--batches", "5", "--out", str(tmp_path / "c.json")], "of which 4 are fitted (every fourth is held out), ex"),
    ):
        assert main([*arguments, *more]) == 1
        assert message in capsys.readouterr().err
    assert measured == []
    schema = read_schema(debug_data)
    unknowns = len(cost_terms(schema, ModelConfig())) + 2
    enough = next(n for n in range(100) if n - n // 4 >= unknowns)
    check_batches(schema, ModelConfig(), batches=enough)
    with pytest.raises(ConfigError, match=f"expected at least {enough} for the {unknowns} unknowns"):
        check_batches(schema, ModelConfig(), batches=enough - 1)


def test_profile_measures_whole_batches_and_needs_no_cost_file(monkeypatch, capsys, debug_data, tmp_path) -> None:
    """The memory of a batch that a budget cuts is not that of its rows; and the file may be the one to be made."""
    found = []

    def measure(trainer, lengths, **named):
        found.append(trainer.config.balance)
        raise ConfigError("seen enough")

    monkeypatch.setattr("gem_pipelines.cost_fit.measure_steps", measure)
    out = str(tmp_path / "cost.json")
    budget = ["--balance.cost", out, "--balance.budget", "200"]
    assert main(["profile", "--fit-cost", "--recipe", "debug", "--data", str(debug_data), "--out", out, *budget]) == 1
    said = capsys.readouterr()
    assert "seen enough" in said.err
    assert "balance.budget: left out, batches are measured whole" in said.out
    assert found == [BalanceConfig()]


def test_kept_bytes_are_of_tensors_and_not_of_addresses(debug_data) -> None:
    """Ten passes, each freed by its backward before the next: their tensors have the same addresses."""
    linear = torch.nn.Linear(64, 64)

    def kept(passes: int) -> int:
        def step(batches, *, clock):
            for _ in range(passes):
                torch.nn.functional.silu(linear(torch.ones(32, 64))).sum().backward()

        runtime = SimpleNamespace(device=torch.device("cpu"))
        return _saved_bytes(SimpleNamespace(parallel=SimpleNamespace(module=linear), step=step, runtime=runtime), None)

    once = kept(1)
    assert once == 2 * 32 * 64 * 4  # the input, and what silu keeps
    assert kept(10) == 10 * once


def test_every_unknown_of_a_fit_is_printed() -> None:
    terms = (
        CostTerm(stream="s", coefficient=2.0, extra=2, targets=1),
        CostTerm(stream="s", coefficient=3.0, pairs=True, causal=True, window=4, extra=2, targets=1),
        CostTerm(stream="s", coefficient=4.0, repeated=True),
    )
    model = CostModel(unit="seconds", per_step=5.0, per_sample=6.0, per_impression=7.0, terms=terms)
    error = FitError(count=3, mean=0.1, worst=0.2)
    lines = describe({"time": Fitted(model=model, on_fit=error, held_out=error, requests=True)})
    assert lines[:4] == [
        "time: seconds; 5 a step, 6 a row, 7 an impression beyond a row's first",
        "    s: 2 a token, 2 more than events, 1 more for every further impression",
        "    s: 3 a causal pair within 4, 2 more than events, 1 more for every further impression",
        "    s: 4 a token, for every impression",
    ]
    plain = describe({"time": Fitted(model=model, on_fit=error, held_out=error)})
    assert plain[0] == "time: seconds; 5 a step, 6 a row"


def test_drawn_lengths_tell_tokens_from_pairs(debug_data) -> None:
    schema = read_schema(debug_data)
    drawn = draw_lengths(schema, most_rows=64, batches=40, seed=0)
    rows = [len(next(iter(lengths.values()))) for lengths in drawn]
    assert min(rows) < 8
    assert max(rows) > 32
    name = schema.streams[0].name
    equal = [len(set(lengths[name].tolist())) == 1 for lengths in drawn]
    assert equal.count(True) > 12
    assert equal.count(False) > 12


@pytest.mark.parametrize("batches", [28, 48])
def test_long_tailed_batches_are_held_out_too(debug_data, monkeypatch, batches) -> None:
    """The error that a fit states is of both kinds of batches: seen by what fit_cost is given to hold out."""
    schema = read_schema(debug_data)
    drawn = draw_lengths(schema, most_rows=64, batches=batches, seed=0)
    rest = []

    def error_of(model, observations):
        rest.append([len(set(o.lengths[schema.streams[0].name].tolist())) for o in observations])
        return FitError(count=len(observations), mean=0.0, worst=0.0)

    monkeypatch.setattr(cost, "fit_error", error_of)
    measured = [Measured(lengths=x, rows=len(next(iter(x.values()))), seconds=(1.0,), saved_bytes=1) for x in drawn]
    trainer = SimpleNamespace(schema=schema, config=SimpleNamespace(model=ModelConfig()))
    fit(trainer, measured)
    fitted, held_out = rest[:2]
    assert (len(fitted), len(held_out)) == (batches * 3 // 4, batches // 4)
    for kinds in (fitted, held_out):
        assert sum(found == 1 for found in kinds) >= len(kinds) // 3
        assert sum(found > 1 for found in kinds) >= len(kinds) // 3


def test_data_without_streams_have_no_cost_to_fit(debug_data) -> None:
    schema = dataclasses.replace(read_schema(debug_data), streams=())
    with pytest.raises(ConfigError, match="have no event stream"):
        draw_lengths(schema, most_rows=8, batches=2, seed=0)
