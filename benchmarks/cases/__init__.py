"""The one list of benchmark cases; every runner takes its cases from here.

for case in all_cases(): ...
find("attention.hstu_eager_ragged")
"""

from __future__ import annotations

from cases import (
    attention,
    balance,
    comm,
    data,
    data_more,
    datasets,
    embeddings,
    imports,
    kernels,
    pipelines,
    reliability,
)
from cases.case import Case, figures, prepare

__all__ = ["Case", "all_cases", "figures", "find", "prepare"]

MODULES = (imports, attention, comm, data, data_more, balance, datasets, embeddings, kernels, pipelines, reliability)


def all_cases() -> tuple[Case, ...]:
    """Every case, in a fixed order; names are unique."""
    cases = tuple(case for module in MODULES for case in module.CASES)
    names = [case.name for case in cases]
    doubles = {name for name in names if names.count(name) > 1}
    if doubles:
        raise ValueError(f"case names used twice: {sorted(doubles)}")
    return cases


def find(name: str) -> Case:
    """The case of that name; ValueError with the known names otherwise."""
    known = {case.name: case for case in all_cases()}
    if name not in known:
        raise ValueError(f"no case named {name!r}; there are {', '.join(known)}")
    return known[name]
