"""data.features, data.labels and data.stochastic_length in the job."""

from __future__ import annotations

import pytest
from gem_data.api import read_schema
from gem_pipelines.cli import main
from gem_pipelines.errors import ConfigError
from gem_pipelines.rundir import read_records


def names(schema):
    first = schema.streams[0]
    features = (f"id.{schema.scalars[0].name}", f"stream.{first.name}.{first.fields[0].name}")
    return features, (schema.labels[1].name,)


def test_a_job_has_the_tables_tasks_and_parameters_of_what_it_names(make_job, debug_data, take_steps):
    schema = read_schema(debug_data)
    features, labels = names(schema)
    job = make_job("few", data={"features": features, "labels": labels})
    assert job.trainer.tasks == labels
    keys = {feature for spec in job.trainer.parallel.specs for feature in spec.features}
    assert keys == {features[0].removeprefix("id."), features[1].removeprefix("stream.")}
    (record,) = take_steps(job, 1)
    assert set(record["loss_by_task"]) == set(labels)
    assert list(job._read(job._steps())[0].streams) == [schema.streams[0].name]


def test_evaluation_and_report_of_such_a_job(debug_data, tmp_path):
    features, labels = names(read_schema(debug_data))
    run = tmp_path / "run"
    overrides = ["--data.features", *features, "--data.labels", *labels, "--train.steps", "2"]
    overrides += ["--train.peak-flops-per-s", "1e9", "--train.tensorboard", "False"]
    assert main(["train", "--recipe", "debug", "--data", str(debug_data), "--run-dir", str(run), *overrides]) == 0
    (evaluation,) = (r for r in read_records(run / "metrics.jsonl") if r["kind"] == "eval")
    assert set(evaluation["tasks"]) == set(labels)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"features": ("id.itm",)}, r"data\.features: expected names of id\..*; came 'id\.itm'"),
        ({"labels": ("clik",)}, r"data\.labels: expected names of click, .*; came 'clik'"),
        ({"stochastic_length": 3.0}, r"data\.stochastic_length is 3\.0, expected 1 to 2"),
    ],
)
def test_what_cannot_be_is_a_config_error(make_job, values, says):
    with pytest.raises(ConfigError, match=says):
        make_job("bad", data=values)


def test_stochastic_length_cuts_training_and_not_evaluation(make_job):
    """Six events at most: rows keep 6^0.5 = 2, or all."""
    whole, cut = make_job("whole"), make_job("cut", data={"stochastic_length": 1.0})
    pairs = list(zip(whole._read(whole._steps()), cut._read(cut._steps()), strict=True))
    for before, after in pairs:
        assert before.sample_ids.tolist() == after.sample_ids.tolist()
        for name, stream in before.streams.items():
            lengths, kept = stream.offsets.diff().tolist(), after.streams[name].offsets.diff().tolist()
            assert all(b in ({a} if a <= 2 else {2, a}) for a, b in zip(lengths, kept, strict=True))
            assert sum(kept) < sum(lengths)
    assert cut._evaluation_config().stochastic_length is None
