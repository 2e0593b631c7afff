"""Frozen dataclasses to JSON and back, with types checked and unknown keys refused. Knows types, no configuration.

Supported field types: bool, int, float, str, None, Literal, unions of these, tuple[T, ...], tuple[T1, T2], dict[str,
T] and nested dataclasses. An int is accepted where a float is declared; a bool is accepted for neither (True would
quietly be 1).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any, Literal, Union, get_args, get_origin

from gem_pipelines.errors import ConfigError, did_you_mean


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Resolved annotation of every field of dataclass `cls`."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def check_types(instance: Any, path: str) -> None:
    """Raise ConfigError where a field of `instance`, or of a dataclass in it, is not what its annotation says."""
    for name, expected in field_types(type(instance)).items():
        value = getattr(instance, name)
        if not _fits(value, expected):
            key = f"{path}.{name}" if path else name
            raise ConfigError(
                f"{key} is {value!r} ({type(value).__name__}), expected {describe_type(expected)}{_more(value)}"
            )
        for inner, nested in _nested(value, f"{path}.{name}" if path else name):
            check_types(nested, inner)


def _nested(value: Any, path: str) -> list[tuple[str, Any]]:
    """(dotted key, dataclass) of every dataclass directly in `value`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(path, value)]
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in _nested(item, f"{path}.{key}")]
    if isinstance(value, tuple):
        return [found for i, item in enumerate(value) for found in _nested(item, f"{path}.{i}")]
    return []


def describe_type(expected: Any) -> str:
    """The type as an error message shows it."""
    if get_origin(expected) is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(expected))
    if get_origin(expected) in (Union, types.UnionType):
        return " or ".join(describe_type(option) for option in get_args(expected))
    if expected is type(None):
        return "None"
    if get_origin(expected) is tuple and get_args(expected)[1:] == (Ellipsis,):
        return f"any number of {describe_type(get_args(expected)[0])}"
    return expected.__name__ if isinstance(expected, type) and not get_args(expected) else str(expected)


def _fits(value: Any, expected: Any) -> bool:
    origin, arguments = get_origin(expected), get_args(expected)
    if expected is Any:
        return True
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in arguments)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(map(_fits, value, _item_types(value, arguments)))
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items()
        )
    if expected is float:
        # Infinities and NaN cannot be written into config.json or a manifest, and no value of a run means them.
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, expected)


def _more(value: Any) -> str:
    return ", finite" if isinstance(value, float) and not math.isfinite(value) else ""


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def _item_types(value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return (arguments[0],) * len(value)
    return arguments if len(arguments) == len(value) else (type(NotImplemented),) * max(1, len(value))


def to_json(value: Any) -> Any:
    """Plain dicts, lists and scalars; tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def from_json(cls: type, value: Any, *, path: str = "") -> Any:
    """An instance of dataclass `cls` from its JSON form. Unknown and missing keys, and wrong types, raise
    ConfigError.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{path or 'config'} is {value!r}, expected an object with the fields of {cls.__name__}")
    known = field_types(cls)
    for key in value:
        if key not in known:
            where = f"{path}.{key}" if path else str(key)
            raise ConfigError(f"unknown config key {where!r}; {did_you_mean(str(key), known)}")
    arguments = {
        name: _decode(value[name], kind, path=f"{path}.{name}" if path else name)
        for name, kind in known.items()
        if name in value
    }
    try:
        return cls(**arguments)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        # A field without default is missing, or a value is not what the class computes with.
        raise ConfigError(f"{path or 'config'}: {error}") from None


def _decode(value: Any, expected: Any, *, path: str) -> Any:
    origin, arguments = get_origin(expected), get_args(expected)
    if dataclasses.is_dataclass(expected):
        return from_json(typing.cast(type, expected), value, path=path)
    if origin in (Union, types.UnionType):
        nested = [
            option for option in arguments if dataclasses.is_dataclass(option) or get_origin(option) in (tuple, dict)
        ]
        return _decode(value, nested[0], path=path) if value is not None and len(nested) == 1 else value
    if origin is tuple and isinstance(value, list):
        items = _item_types(value, arguments)
        return tuple(
            # A tuple of the wrong length stays one: its type is refused afterwards.
            _decode(item, kind, path=f"{path}.{i}")
            for i, (item, kind) in enumerate(zip(value, items, strict=False))
        )
    if origin is dict and isinstance(value, dict):
        return {key: _decode(item, arguments[1], path=f"{path}.{key}") for key, item in value.items()}
    return value


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> scalar (or tuple of scalars) of a config; tuples of dataclasses get numbered keys."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
        items = [(str(i), item) for i, item in enumerate(value)]
    else:
        return {path: value}
    flat: dict[str, Any] = {}
    for name, item in items:
        flat |= flatten(item, f"{path}.{name}" if path else name)
    return flat
