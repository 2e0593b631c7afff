"""Calibration and ROC against plain numpy and scikit-learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gem_pipelines.report.curves import read_curves
from sklearn.metrics import roc_auc_score, roc_curve


def write(path: Path, **columns: np.ndarray) -> Path:
    pq.write_table(pa.table({name.replace("_", "."): values for name, values in columns.items()}), path)
    return path


def area(fpr: np.ndarray, tpr: np.ndarray) -> float:
    return float(np.trapezoid(tpr, fpr))


def sample(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    chance = random.beta(1.5, 6, rows)
    label = (random.random(rows) < chance).astype(np.float32)
    return label, chance.astype(np.float32), random.choice([0.0, 0.5, 1.0, 2.0], rows).astype(np.float32)


def test_worked_example(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.parquet",
        label_click=np.float32([0, 0, 1]),
        prediction_click=np.float32([0.1, 0.2, 0.3]),
        weight_click=np.float32([1, 1, 2]),
    )
    (only,) = read_curves(path, bins=1)[0].bins
    assert only.mean_prediction == pytest.approx(0.225)
    assert (only.rate, only.count, only.weight) == (0.5, 3, 4.0)
    assert only.low <= 0.1 < 0.3 <= only.high


@pytest.mark.parametrize("weighted", [True, False])
def test_roc_is_scikit_learns(tmp_path: Path, weighted: bool) -> None:
    label, prediction, weight = sample(20_000)
    columns = {"label_click": label, "prediction_click": prediction} | ({"weight_click": weight} if weighted else {})
    (curves,) = read_curves(write(tmp_path / "p.parquet", **columns), batch_rows=3_000)
    weights = weight if weighted else None
    assert len(curves.roc_fpr) <= 302
    assert area(curves.roc_fpr, curves.roc_tpr) == pytest.approx(
        roc_auc_score(label, prediction, sample_weight=weights), abs=2e-4
    )
    fpr, tpr, _ = roc_curve(label, prediction, sample_weight=weights, drop_intermediate=False)
    assert np.abs(np.interp(curves.roc_fpr, fpr, tpr) - curves.roc_tpr).max() < 5e-3
    assert (curves.roc_fpr[0], curves.roc_tpr[0], curves.roc_fpr[-1], curves.roc_tpr[-1]) == (0, 0, 1, 1)


def test_ties_are_one_straight_piece(tmp_path: Path) -> None:
    label, prediction = np.float32([0, 1, 0, 1]), np.float32([0.2, 0.2, 0.2, 0.2])
    (curves,) = read_curves(write(tmp_path / "p.parquet", label_a=label, prediction_a=prediction))
    assert curves.roc_fpr.tolist() == curves.roc_tpr.tolist() == [0, 1]
    assert [b.count for b in curves.bins] == [4], "rows with equal predictions share one bin"


def test_bins_hold_equal_counts_and_their_sums_are_the_totals(tmp_path: Path) -> None:
    label, prediction, weight = sample(30_000)
    path = write(tmp_path / "p.parquet", label_a=label, prediction_a=prediction, weight_a=weight)
    counted = weight > 0
    tenth = int(counted.sum()) // 10
    (curves,) = read_curves(path, bins=10)
    counts = np.array([b.count for b in curves.bins])
    assert (counts.sum(), curves.weightless, curves.rows) == (counted.sum(), 30_000 - counted.sum(), 30_000)
    assert np.abs(counts - tenth).max() <= 30
    weights = np.array([b.weight for b in curves.bins])
    exact = weight.astype(np.float64)
    assert weights.sum() == pytest.approx(exact.sum())
    assert weights @ [b.mean_prediction for b in curves.bins] == pytest.approx((exact * prediction).sum())
    assert weights @ [b.rate for b in curves.bins] == pytest.approx((exact * label).sum())
    label, prediction, weight = label[counted], prediction[counted], weight[counted]
    order = np.argsort(prediction, kind="stable")[tenth : 2 * tenth]  # the second tenth, up to cells at its edges
    assert curves.bins[1].rate == pytest.approx(np.average(label[order], weights=weight[order]), abs=2e-3)


def test_rows_of_weight_0_count_nowhere_but_apart(tmp_path: Path) -> None:
    """Curves, bins and whiskers are those of the file without these rows, whatever they hold."""
    label, prediction, weight = sample(3_000)
    weight[:5], label[0], prediction[1], prediction[2] = 0, 7, np.nan, 1.5
    keep = weight > 0
    paths = [
        write(tmp_path / f"{name}.parquet", label_a=label[rows], prediction_a=prediction[rows], weight_a=weight[rows])
        for name, rows in (("all", np.ones(3_000, bool)), ("kept", keep))
    ]
    (whole,), (kept,) = (read_curves(path) for path in paths)
    assert 500 < whole.weightless == 3_000 - kept.rows
    assert (whole.skipped, kept.skipped, kept.weightless) == (0, 0, 0)
    assert whole.bins == kept.bins
    assert np.array_equal(whole.roc_fpr, kept.roc_fpr)
    assert np.array_equal(whole.roc_tpr, kept.roc_tpr)


def test_only_rows_of_weight_0_are_undefined(tmp_path: Path) -> None:
    columns = {"label_a": np.float32([0, 1]), "prediction_a": np.float32([0.1, 0.2]), "weight_a": np.zeros(2)}
    (curves,) = read_curves(write(tmp_path / "p.parquet", **columns))
    assert (curves.rows, curves.weightless, curves.bins, curves.roc_fpr) == (2, 2, (), None)
    assert curves.problem == "undefined: no row has weight"


@pytest.mark.parametrize(("value", "only"), [(0.0, "0"), (1.0, "1")])
def test_one_class_is_undefined(tmp_path: Path, value: float, only: str) -> None:
    label = np.full(5, value, dtype=np.float32)
    (curves,) = read_curves(write(tmp_path / "p.parquet", label_a=label, prediction_a=np.linspace(0, 1, 5)))
    assert curves.roc_fpr is None
    assert curves.problem == f"undefined: all labels with weight are {only}"
    assert sum(b.count for b in curves.bins) == 5


def test_empty_file_is_undefined(tmp_path: Path) -> None:
    (curves,) = read_curves(write(tmp_path / "p.parquet", label_a=np.zeros(0), prediction_a=np.zeros(0)))
    assert (curves.problem, curves.bins, curves.roc_fpr) == ("undefined: no rows", (), None)


def test_numbers_that_are_none_are_counted_and_left_out(tmp_path: Path) -> None:
    prediction = np.array([0.1, np.nan, 1.5, -0.1, 0.9, -0.0, 0.5])
    label = np.array([0, 0, 0, 0, 1, 0, np.nan])
    (curves,) = read_curves(write(tmp_path / "p.parquet", label_a=label, prediction_a=prediction))
    assert (curves.rows, curves.skipped) == (7, 4)
    assert curves.roc_tpr.tolist()[1] == 1.0, "0.9, the only positive, comes first"
    assert sum(b.count for b in curves.bins) == 3


def test_saturated_predictions_stay_inside(tmp_path: Path) -> None:
    label, prediction = np.float32([0, 1, 1]), np.float32([0.0, 1.0, 1.0])
    (curves,) = read_curves(write(tmp_path / "p.parquet", label_a=label, prediction_a=prediction))
    assert curves.bins[0].low == 0.0
    assert curves.bins[-1].high == 1.0
    assert area(curves.roc_fpr, curves.roc_tpr) == 1.0


def test_bad_files_are_named(tmp_path: Path) -> None:
    text = tmp_path / "text.parquet"
    text.write_text("not parquet at all")
    with pytest.raises(ValueError, match=r"text\.parquet: expected a Parquet file"):
        read_curves(text)
    with pytest.raises(ValueError, match=r"expected columns prediction\.<task>, found label\.a"):
        read_curves(write(tmp_path / "a.parquet", label_a=np.zeros(1)))
    with pytest.raises(ValueError, match=r"expected the column label\.a, found prediction\.a"):
        read_curves(write(tmp_path / "b.parquet", prediction_a=np.zeros(1)))
    strings = write(tmp_path / "c.parquet", label_a=np.array(["x"]), prediction_a=np.zeros(1))
    with pytest.raises(ValueError, match=r"c\.parquet: the columns of task 'a' cannot be read"):
        read_curves(strings)


@pytest.mark.slow
def test_twenty_million_rows_take_little_memory(tmp_path: Path) -> None:
    import resource

    path, rows = tmp_path / "large.parquet", 1 << 20
    label, prediction, _ = sample(rows)
    table = pa.table({"label.a": label, "prediction.a": prediction})
    with pq.ParquetWriter(path, table.schema) as writer:
        for _ in range(20):
            writer.write_table(table)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (curves,) = read_curves(path)
    assert curves.rows == 20 * rows
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 300 * 2**20
