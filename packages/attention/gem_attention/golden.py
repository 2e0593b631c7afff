"""Versioned test vectors: inputs and true results in one small file, for systems that cannot import this package.

vectors/attention-<major>.<minor>.npz, readable by numpy.load(path, allow_pickle=False), holds four arrays:
    "format"    a JSON text: {"version": [1, 0], "cases": {case: {"spec": {...}, "tensors": {name: place}}}} with
                place = [array, start, shape]
    "float16"   the inputs q, k, v, position_table, time_table, divisor, grad_out, flat; exact in bfloat16 too
    "float64"   "expected/out" and the gradients "expected/q", ... by the reference in float64, flat
    "int64"     q_offsets, k_offsets, num_targets, num_context, kv_index, timestamps, flat
so tensor = file[array][start : start + prod(shape)].reshape(shape). (An array a tensor would triple the file.)
A spec reads as in interface.AttentionSpec. To write the file anew or to check an implementation:
    python -m gem_attention.golden write | check [--impl eager]
"""

from __future__ import annotations

import argparse
import io
import json
import math
import zipfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gem_attention import api, reference
from gem_attention.interface import INTERFACE_VERSION, Attention, AttentionSpec
from gem_attention.spec_text import spec_from_fields
from gem_attention.testing import Case, Inputs, Result, make_inputs, row_error, run_case, usual_cases

PATH = Path(__file__).parent / "vectors" / f"attention-{INTERFACE_VERSION[0]}.{INTERFACE_VERSION[1]}.npz"
INDEX_NAMES = ("q_offsets", "k_offsets", "num_targets", "num_context", "kv_index", "timestamps")
FLOAT_NAMES = ("q", "k", "v", "position_table", "time_table", "divisor", "grad_out")


def golden_cases() -> list[Case]:
    """One case per mask, activation, query kind and bias of the conformance suite, with small dims and samples."""
    chosen = []
    for case in usual_cases():
        kept = case.name.startswith("silu-") or case.name.endswith(("-uniform", "-per-token-broadcast"))
        if not kept or case.strided or not sum(case.q_lengths) or case.name.endswith("-edges"):
            continue
        small = replace(case, qk_dim=3, v_dim=2)
        if case.k_lengths is not None:
            q_lengths = tuple(min(n, 3) for n in case.q_lengths)
            small = replace(small, q_lengths=q_lengths, k_lengths=tuple(min(n, 5) for n in case.k_lengths))
        if case.spec.query == "self":
            lengths = (65,) if case.spec.mask.block else (4, 0, 5, 1)
            small = replace(small, q_lengths=lengths)
            if case.num_targets is not None:
                small = replace(small, num_targets=tuple((n + 1) // 3 for n in lengths))
            if case.num_context is not None:
                small = replace(small, num_context=tuple((n + 2) // 4 for n in lengths))
        chosen.append(small)
    return chosen


def write(path: Path = PATH) -> None:
    """Write the vectors of the current reference; the same bytes for the same code and numpy."""
    flat: dict[str, list[np.ndarray[Any, Any]]] = {"float16": [], "float64": [], "int64": []}
    sizes = dict.fromkeys(flat, 0)
    described = {}

    def add(tensor: Tensor, array: str) -> list[Any]:
        start = sizes[array]
        sizes[array] += tensor.numel()
        flat[array].append(tensor.to(getattr(torch, array)).numpy().reshape(-1))
        return [array, start, list(tensor.shape)]

    for case in golden_cases():
        inputs = make_inputs(case, torch.float64)
        tensors = {n: add(t, "float16") for n in FLOAT_NAMES if (t := getattr(inputs, n)) is not None}
        tensors |= {n: add(t, "int64") for n in INDEX_NAMES if (t := getattr(inputs.layout, n)) is not None}
        result = run_case(reference.attention, case, inputs).tensors()
        tensors |= {f"expected/{n}": add(t, "float64") for n, t in result.items()}
        described[case.name] = {"spec": asdict(case.spec), "tensors": tensors}
    text = json.dumps({"version": list(INTERFACE_VERSION), "cases": described}, sort_keys=True)
    arrays = {name: np.concatenate(parts) for name, parts in flat.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in {"format": np.array(text), **arrays}.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            # numpy.savez would stamp today's date into the file.
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            archive.writestr(info, buffer.getvalue(), zipfile.ZIP_DEFLATED)


def read(path: Path = PATH) -> dict[str, tuple[AttentionSpec, dict[str, Tensor]]]:
    """Case name -> spec and tensors by their name in the file ("q", "k_offsets", "expected/out", ...)."""
    with np.load(path, allow_pickle=False) as file:
        described = json.loads(str(file["format"]))
        if described["version"] != list(INTERFACE_VERSION):
            raise ValueError(f"{path}: version {described['version']}, this package has {list(INTERFACE_VERSION)}")
        arrays = {name: torch.from_numpy(file[name]) for name in ("float16", "float64", "int64")}
    result = {}
    for case, entry in described["cases"].items():
        tensors = {
            name: arrays[array][start : start + math.prod(shape)].reshape(shape)
            for name, (array, start, shape) in entry["tensors"].items()
        }
        result[case] = (spec_from_fields(entry["spec"]), tensors)
    return result


def check(attention: Attention, path: Path = PATH, *, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """Case -> largest row error over output and gradients, relative to the largest true value of that tensor."""
    worst = {}
    for name, (spec, tensors) in read(path).items():
        result = _run(attention, spec, tensors, dtype)
        errors = [0.0]
        for key, tensor in result.tensors().items():
            true = tensors[f"expected/{key}"]
            if tensor.shape != true.shape:
                raise ValueError(f"{name}: {key} has shape {tuple(tensor.shape)}, expected {tuple(true.shape)}")
            scale = float(true.abs().max()) if true.numel() else 0.0
            errors.append(row_error(tensor, true) / scale if scale else row_error(tensor, true))
        worst[name] = max(errors)
    return worst


def _run(attention: Attention, spec: AttentionSpec, tensors: dict[str, Tensor], dtype: torch.dtype) -> Result:
    index: dict[str, Any] = {name: tensors[name] for name in INDEX_NAMES if name in tensors}
    if spec.query == "self":
        del index["k_offsets"]
    layout = api.make_layout(**index, tail=spec.query == "tail")
    floats = {name: tensors[name].to(dtype) if name in tensors else None for name in FLOAT_NAMES}
    # run_case reads nothing of a case but its spec
    return run_case(attention, Case(name="golden", spec=spec, q_lengths=()), Inputs(layout=layout, **floats))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description="Test vectors of gem_attention")
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("--impl", default="reference", choices=(*api.IMPLEMENTATIONS, "auto"))
    parser.add_argument("--path", type=Path, default=PATH)
    arguments = parser.parse_args()
    if arguments.action == "write":
        write(arguments.path)
        return
    for name, error in check(partial(api.attention, impl=arguments.impl), arguments.path).items():
        print(f"{name:40s} {error:.2e}")


if __name__ == "__main__":
    main()
