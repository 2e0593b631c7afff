"""What counting alone reaches: a model that does not pass these floors has not earned a claim.

    logistic_floor      logistic regression on one-hot user and item ids: who rates high, what is rated high
    running_rate_floor  logistic regression on two numbers: the user's and the item's past rate of the label

Both read the native columns `user_id`, `id.item`, `timestamp`, `label.<task>` (and `weight.<task>`: rows of weight 0
are left out, in fitting as in scoring) and return {"auc": ..., "ne": ...} on the evaluation rows. They are fitted by
LBFGS in float64 on the training rows only, to convergence: no seed, no step size, the same figures on every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from gem_datasets.history import EventLog, smoothed_rate
from gem_datasets.prepared import DatasetError, Floats, Ints
from gem_datasets.scores import auc, normalized_entropy


def logistic_floor(train: pa.Table, eval: pa.Table, label: str, *, l2: float = 1.0) -> dict[str, float]:
    """AUC and NE of logit = bias + w[user] + v[item], loss sum plus l2 / 2 * (|w|^2 + |v|^2) minimized.

    Users and items that training rows do not contain keep weight 0. The penalty is that of scikit-learn's
    LogisticRegression(C=1/l2). On MovieLens-100K: AUC 0.7057, NE 0.9086.
    """
    fit, test = _rows(train, label), _rows(eval, label)
    user, user_test, users = _index(fit["user_id"], test["user_id"])
    item, item_test, items = _index(fit["id.item"], test["id.item"])
    user_t, item_t = torch.from_numpy(user), torch.from_numpy(item)

    def logit(weights: Tensor) -> Tensor:
        return weights[0] + weights[1:][user_t] + weights[1 + users :][item_t]

    w = _fit(logit, fit["label"], torch.zeros(1 + users + items, dtype=torch.float64), l2)
    # One zero more at the end of each block, for ids that are new in the evaluation rows.
    w_user, w_item = np.append(w[1 : 1 + users], 0.0), np.append(w[1 + users :], 0.0)
    return _scores(test["label"], w[0] + w_user[user_test] + w_item[item_test])


def running_rate_floor(
    train: pa.Table,
    eval: pa.Table,
    label: str,
    *,
    strength: float = 5.0,
) -> dict[str, float]:
    """AUC and NE of logit = bias + a * (user's past rate) + b * (item's past rate).

    A past rate counts rows strictly before the row's second, of both splits (an evaluation row sees what happened
    before it, not its own second), and is smoothed towards the rate of all such rows with weight `strength`. A
    delayed label counts as if it were known at once. On MovieLens-100K: AUC 0.7374, NE 0.8685.
    """
    parts = [_rows(train, label), _rows(eval, label)]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    cut = len(parts[0]["label"])
    time, y = rows["timestamp"], rows["label"]
    everyone = EventLog.of(np.zeros_like(time), time).earlier(np.zeros_like(time), time)
    base = (everyone.sum(y) + 1.0) / (everyone.lengths() + 2.0)
    rates = []
    for column in ("user_id", "id.item"):
        group = np.unique(rows[column], return_inverse=True)[1].astype(np.int64)
        earlier = EventLog.of(group, time).earlier(group, time)
        rates.append(smoothed_rate(earlier, y, prior=base, strength=strength))
    features = np.stack([np.ones(len(y)), *(rate - rate[:cut].mean() for rate in rates)], axis=1)
    features_train = torch.from_numpy(features[:cut])
    w = _fit(lambda weights: features_train @ weights, y[:cut], torch.zeros(3, dtype=torch.float64), 0.0)
    return _scores(y[cut:], features[cut:] @ w)


def _fit(logit: Callable[[Tensor], Tensor], label: Floats, start: Tensor, l2: float) -> Floats:
    """Weights that minimize sum of log losses + l2 / 2 * |weights[1:]|^2 (convex; LBFGS to convergence)."""
    target = torch.from_numpy(label)
    weights = start.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=500,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit(weights), target, reduction="sum")
        # Per row, so that the tolerances do not depend on the number of rows.
        loss = (loss + l2 / 2.0 * weights[1:].square().sum()) / len(label)
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach().numpy()


def _scores(label: Floats, logit: Floats) -> dict[str, float]:
    return {"auc": auc(label, logit), "ne": normalized_entropy(label, 1.0 / (1.0 + np.exp(-logit)))}


def _rows(table: pa.Table, label: str) -> dict[str, npt.NDArray[Any]]:
    """The columns that floors read, without rows of weight 0."""
    columns = ("user_id", "id.item", "timestamp", f"label.{label}")
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise DatasetError(f"floors need the columns {', '.join(columns)}; missing: {', '.join(missing)}")
    rows = {column: table[column].to_numpy() for column in columns[:3]}
    rows["label"] = table[columns[3]].to_numpy().astype(np.float64)
    weight = f"weight.{label}"
    if weight in table.column_names:
        kept = table[weight].to_numpy() > 0
        rows = {name: values[kept] for name, values in rows.items()}
    if not 0.0 < rows["label"].sum() < len(rows["label"]):
        raise DatasetError(
            f"floors need both classes of label.{label}: {rows['label'].sum():.0f} positives "
            f"in {len(rows['label'])} rows"
        )
    return rows


def _index(train: Ints, test: Ints) -> tuple[Ints, Ints, int]:
    """0-based indices of training ids, of test ids (`count` where training has no such id), and the count."""
    known, index = np.unique(train, return_inverse=True)
    place = np.minimum(np.searchsorted(known, test), len(known) - 1)
    return index.astype(np.int64), np.where(known[place] == test, place, len(known)), len(known)
