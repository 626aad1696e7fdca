"""Kinds of values: whether the fields of settings have values of the types that they declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from deltachain.errors import ConfigError

_WORDS: Final[Mapping[Any, str]] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "None",
}


def check_kinds(settings: Any) -> None:  # noqa: ANN401 - any dataclass
    """Check that each field of a dataclass has a value of its declared type.

    Numbers of NumPy are numbers, a whole number is a number too, and ``True`` is neither. Members
    of mappings are not looked at.

    Raises:
        ConfigError: A value has another type, or is no member of a ``Literal``.
    """
    kinds = get_type_hints(type(settings))
    for field in fields(settings):
        value, choices = getattr(settings, field.name), tuple(_choices(kinds[field.name]))
        if not any(_is_of(value, choice) for choice in choices):
            raise ConfigError(
                f"{field.name}={value!r}: expected {_described(choices)}, found a "
                f"{type(value).__name__}",
                hint=f"give {field.name} another value, or leave it out for its default",
            )


def _choices(kind: Any) -> Iterator[Any]:  # noqa: ANN401 - a type or a form of typing
    if get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _choices(one)
    else:
        yield kind


def _is_of(value: object, kind: Any) -> bool:  # noqa: ANN401 - a type or a form of typing
    origin = get_origin(kind)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(one, get_args(kind)[0]) for one in value)
    if kind in (int, float):
        numbers = Integral if kind is int else Real
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def _described(choices: tuple[Any, ...]) -> str:
    words = [word for choice in choices for word in _words_of(choice)]
    *others, last = words
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"one of {listed}" if get_origin(choices[0]) is Literal else listed


def _words_of(kind: Any) -> list[str]:  # noqa: ANN401 - a type or a form of typing
    origin = get_origin(kind)
    if origin is Literal:
        return [repr(member) for member in get_args(kind)]
    if origin is tuple:
        return ["a tuple of texts"]
    if origin is not None:
        return ["a mapping"]
    return [_WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")]
