"""Kinds of values: whether settings are fields, and have values of the types that those declare."""

import operator
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final

from deltachain.errors import ConfigError

_T = typing.TypeVar("_T")

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
    """
    kinds = typing.get_type_hints(type(settings))
    for field in fields(settings):
        value, choices = getattr(settings, field.name), tuple(_choices(kinds[field.name]))
        if not any(_is_of(value, choice) for choice in choices):
            raise ConfigError(
                f"{field.name}={value!r}: expected {_described(choices)}, found a "
                f"{type(value).__name__}",
                hint=f"give {field.name} another value, or leave it out for its default",
            )


def whole(name: str, value: typing.SupportsIndex, *, hint: str = "for example 3") -> int:
    """Return a number of any integer type, of Python, NumPy or torch; refuse any other value."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(
            f"{name}={value!r} is a {type(value).__name__}, expected a whole number", hint=hint
        ) from None


def fields_of(settings: type) -> dict[str, str]:
    return {field.name: settings.__name__ for field in fields(settings)}


def names_checked(elsewhere: Mapping[str, str] | None = None) -> Callable[[type[_T]], type[_T]]:
    def decorated(kind: type[_T]) -> type[_T]:
        plain: Callable[..., None] = kind.__init__
        own = dict.fromkeys([*signature(plain).parameters][1:], kind.__name__)
        known = {**(elsewhere or {}), **own}

        @wraps(plain)
        def init(self: _T, *args: object, **settings: object) -> None:
            for name in settings.keys() - own.keys():
                near = [name] if name in known else get_close_matches(name, known, 1)
                of = "" if not near or near[0] in own else f" of {known[near[0]]}"
                raise ConfigError(
                    f"{kind.__name__}: there is no setting {name!r}",
                    hint=f"did you mean {near[0]!r}{of}?"
                    if near
                    else f"settings are fields of {kind.__name__}: {', '.join(own)}",
                )
            plain(self, *args, **settings)

        setattr(kind, "__init__", init)  # noqa: B010 - mypy knows no other way
        return kind

    return decorated


def _choices(kind: Any) -> Iterator[Any]:  # noqa: ANN401 - a type or a form of typing
    if typing.get_origin(kind) in (typing.Union, UnionType):
        for one in typing.get_args(kind):
            yield from _choices(one)
    else:
        yield kind


def _is_of(value: object, kind: Any) -> bool:  # noqa: ANN401 - a type or a form of typing
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if origin is tuple:
        return isinstance(value, tuple) and all(
            _is_of(one, typing.get_args(kind)[0]) for one in value
        )
    if kind in (int, float):
        numbers = Integral if kind is int else Real
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def _described(choices: tuple[Any, ...]) -> str:
    words = [word for choice in choices for word in _words_of(choice)]
    *others, last = words
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"one of {listed}" if typing.get_origin(choices[0]) is typing.Literal else listed


def _words_of(kind: Any) -> list[str]:  # noqa: ANN401 - a type or a form of typing
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return [repr(member) for member in typing.get_args(kind)]
    if origin is tuple:
        return ["a tuple of texts"]
    if origin is not None:
        return ["a mapping"]
    return [_WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")]
