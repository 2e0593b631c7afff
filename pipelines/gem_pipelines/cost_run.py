"""The coefficients of a run: found once, on rank 0, the same on every rank, and the same for the whole run.

Base batches are ordered by loads, and every rank computes the order for itself: two hosts whose files of coefficients
differ would lose some rows and train others twice. So only rank 0 reads `balance.cost`, and the others have what it
says; what it cannot read stops all of them.

Loads also decide which rank trains a row and where micro-batches are cut, so a run that goes on with other coefficients
is another run, in its last bits at least. They are therefore part of it: RUN/cost.json is written at its start, in the
form that `balance.cost` reads, and a resumed run takes them from there, whatever the file that they came from holds by
now. Other ones, given anew, are refused with their differences; so is a checkpoint of other ones, where they matter.

Cost: a few kilobytes from rank 0, once a start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gem_data.api import cost_from_dict, cost_to_dict
from gem_data.interface import CostModel, Schema

from gem_pipelines.config import BalanceConfig
from gem_pipelines.cost import Costs, costs_from_json, load_costs
from gem_pipelines.errors import ConfigError
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.runtime import Runtime
from gem_pipelines.safe_files import read_json

_NAME = "balance.cost"


def common_costs(
    config: BalanceConfig,
    schema: Schema,
    model: ModelConfig,
    runtime: Runtime,
    *,
    saved: Path | None = None,
    anew: bool = False,
) -> Costs:
    """The costs of a run on every rank, as rank 0 finds them. A collective.

    saved  cost.json of the run that goes on; None, or missing: what `balance.cost` names
    anew   `balance.cost` was given for this start, and not taken from the run: it is compared though its name is equal

    Raises ConfigError on all ranks (RemoteError on those that repeat it) where rank 0 cannot use the file, or where it
    holds other coefficients than the run.
    """
    found: list[Costs] = []

    def find() -> None:
        kept = None if saved is None or not saved.exists() else _read_saved(saved, schema)
        if kept is None or anew or kept.name != config.cost:
            given = load_costs(config, schema, model)
            if kept is not None and saved is not None:
                _check_same(kept, given, config, saved)
            found.append(given if kept is None else replace(kept, name=config.cost))
        else:
            found.append(kept)

    runtime.on_main(find)
    content = json.loads(runtime.from_main(json.dumps(to_json(found[0])) if found else ""))
    return costs_from_json(content, schema, name=content[_NAME], source="rank 0's costs")


def to_json(costs: Costs) -> dict[str, Any]:
    """cost.json of a run: what `balance.cost` reads, and which value of it that was."""
    memory = {} if costs.memory is None else {"memory": cost_to_dict(costs.memory)}
    return {_NAME: costs.name, "time": cost_to_dict(costs.time), **memory}


def _read_saved(path: Path, schema: Schema) -> Costs:
    content = read_json(path)
    name = content.get(_NAME) if isinstance(content, dict) else None
    return costs_from_json(content, schema, name=str(name), source=str(path))


def _check_same(kept: Costs, given: Costs, config: BalanceConfig, saved: Path) -> None:
    lines = list(differences(cost_to_dict(kept.time), cost_to_dict(given.time), "time"))
    if config.budget_of == "memory" and kept.memory is not None:
        memory = {} if given.memory is None else cost_to_dict(given.memory)
        lines += differences(cost_to_dict(kept.memory), memory, "memory")
    if lines:
        raise ConfigError(
            f"balance.cost is {config.cost!r}, whose coefficients are not those that this run began with ({saved}). "
            "Leave --balance.cost out: the run goes on with its own. Or begin another run, say with train.init_from. "
            "Different are:\n  " + "\n  ".join(lines)
        )


def stored_costs(load: CostModel, budget: CostModel) -> dict[str, Any]:
    """What a checkpoint says of the costs that it was trained with."""
    return {"load": cost_to_dict(load), "budget": cost_to_dict(budget)}


def cost_mismatches(stored: Any, config: BalanceConfig, *, load: CostModel, budget: CostModel) -> list[str]:
    """One line for each coefficient that decides what a step of this run is, and is another one in the checkpoint.

    Those of base batches are in the loader's state, which compares them itself.
    """
    parts = {"load": ("load of a row", load, config.method == "global")}
    parts["budget"] = ("what balance.budget limits", budget, config.budget is not None)
    lines: list[str] = []
    for key, (what, now, matters) in parts.items():
        if not matters:
            continue
        try:
            before = cost_to_dict(cost_from_dict(stored[key], source="about costs"))
        except (KeyError, TypeError, ValueError) as error:
            return [f"about costs: expected a cost model of {key!r}, came {stored!r:.60} ({error})"]
        lines += differences(before, cost_to_dict(now), what)
    return [f"balance.cost: {line}" for line in lines]


def differences(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> Iterator[str]:
    """One line for each key and term that differs: 'time: terms[0].coefficient: 2.0 before, 6.0 now'."""
    flat = [_flat(value) for value in (before, now)]
    for key in dict.fromkeys([*flat[0], *flat[1]]):
        was, came = (side.get(key, "none") for side in flat)
        if was != came:
            yield f"{what}: {key}: {was} before, {came} now"


def _flat(model: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in model.items() if key != "terms"}
    for number, term in enumerate(model.get("terms", ())):
        plain |= {f"terms[{number}] (stream {term['stream']}).{key}": value for key, value in term.items()}
    return plain
