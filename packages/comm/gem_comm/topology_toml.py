"""Reading a topology from TOML. Keys are the field names of Topology, Tier and Device; an unknown one is an error.

name = "two hosts"
source = "nccl-tests on 2026-01-01"
[device]                       # optional; `gemline plan` needs it
name = "NVIDIA H200"
flops_per_s = 989e12
memory_bytes = 141e9
memory_bytes_per_s = 4.8e12
[[tier]]                       # fastest first
name = "host"
group_size = 8
bandwidth_bytes_per_s = 370e9
latency_s = 8e-6
[[tier]]
name = "network"               # the last tier may leave out group_size: all ranks
bandwidth_bytes_per_s = 48e9
latency_s = 20e-6
oversubscription = 4
"""

from __future__ import annotations

import dataclasses
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from gem_comm.interface import CommError, Device, Tier, Topology
from gem_comm.validation import did_you_mean

EXAMPLES = "topologies"


def read_topology(path: str | Path) -> Topology:
    """The topology in a file, or the shipped one of that name ("h200_cluster", "laptop", "h200_pair").

    Raises CommError naming file, table and key.
    """
    file = Path(path)
    if file.is_file():
        return parse_topology(file.read_text(encoding="utf-8"), where=str(file))
    shipped = shipped_topologies()
    if str(path) in shipped:
        entry = resources.files("gem_comm").joinpath(EXAMPLES, f"{path}.toml")
        return parse_topology(entry.read_text(encoding="utf-8"), where=f"{path}.toml")
    raise CommError(
        f"no topology file {str(path)!r}, and no shipped topology of that name; {did_you_mean(str(path), shipped)}"
    )


def shipped_topologies() -> tuple[str, ...]:
    """Names of the examples that come with this package."""
    folder = resources.files("gem_comm").joinpath(EXAMPLES)
    return tuple(sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml")))


def parse_topology(text: str, *, where: str) -> Topology:
    """The topology that `text` describes; `where` names it in errors."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise CommError(f"{where}: not TOML: {problem}") from None
    tiers = raw.pop("tier", None)
    device = raw.pop("device", None)
    _check_keys(raw, {"name": str, "source": str}, required=("name",), where=where, others=("tier", "device"))
    if not isinstance(tiers, list) or not tiers:
        raise CommError(f"{where}: no [[tier]] table; give the tiers from the fastest to the slowest")
    found = tuple(_build(Tier, tier, f"{where}, [[tier]] number {number + 1}") for number, tier in enumerate(tiers))
    made = None if device is None else _build(Device, device, f"{where}, [device]")
    try:
        return Topology(tiers=found, device=made, **raw)
    except CommError as problem:
        raise CommError(f"{where}: {problem}") from None


def to_toml(topology: Topology) -> str:
    """The file that `read_topology` reads back as the same topology."""
    lines = [f"name = {_text(topology.name)}"]
    if topology.source:
        lines.append(f"source = {_text(topology.source)}")
    if topology.device is not None:
        lines += ["", "[device]", *_lines(topology.device)]
    for tier in topology.tiers:
        lines += ["", "[[tier]]", *_lines(tier)]
    return "\n".join(lines) + "\n"


def _build(kind: Any, table: Any, where: str) -> Any:
    if not isinstance(table, dict):
        raise CommError(f"{where}: expected a table, got {table!r}")
    fields = {field.name: str if field.name == "name" else float for field in dataclasses.fields(kind)}
    optional = ("group_size", "oversubscription")
    if "group_size" in fields:
        fields["group_size"] = int
    _check_keys(table, fields, required=[name for name in fields if name not in optional], where=where)
    return kind(**({"group_size": None} if "group_size" in fields else {}) | table)


def _check_keys(
    table: dict[str, Any], fields: dict[str, type], *, required: Any, where: str, others: tuple[str, ...] = ()
) -> None:
    for key, value in table.items():
        if key not in fields:
            raise CommError(f"{where}: unknown key {key!r}; {did_you_mean(key, (*fields, *others))}")
        allowed = (int, float) if fields[key] is float else fields[key]
        if isinstance(value, bool) or not isinstance(value, allowed):
            kind = {str: "a text", int: "a whole number", float: "a number"}[fields[key]]
            raise CommError(f"{where}: {key} is {value!r}, expected {kind}")
    missing = [key for key in required if key not in table]
    if missing:
        raise CommError(f"{where}: {', '.join(missing)} missing")


def _lines(item: Any) -> list[str]:
    lines = []
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if value is not None:
            lines.append(f"{field.name} = {_text(value) if isinstance(value, str) else value}")
    return lines


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
