"""Values of settings: whether they are of the types that their fields declare."""

import operator
import typing
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from deltachain.errors import ConfigError

Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
NotNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
AtLeastZero: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


def check_kinds(settings: Any) -> None:  # noqa: ANN401 - any dataclass
    """Check that each field of a dataclass has a value of its declared type, within its bounds.

    Numbers of NumPy are numbers, a whole number is a number too, and ``True`` is neither.
    """
    kinds = typing.get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):
        value = getattr(settings, field.name)
        plain = value.item() if hasattr(value, "item") else value
        expected = ""
        try:
            found = msgspec.convert(plain, kinds[field.name])
            if is_dataclass(found) and found is not value:  # made of a mapping
                expected = f"Expected a {type(found).__name__}"
        except msgspec.ValidationError as exc:
            expected = _expected(kinds[field.name]) or str(exc)
        if expected:
            give = "convert it: str(value)" if "`str`, got" in expected else "give another value"
            raise ConfigError(
                f"{field.name}={value!r}: {expected}",
                hint=f"{give}, or leave {field.name} out for its default",
            )


def _expected(kind: Any) -> str:  # noqa: ANN401 - a type or a form of typing
    """Return the choices of a literal; empty for any other type, which msgspec names itself."""
    choices = [kind, *typing.get_args(kind)]
    literals = [one for one in choices if typing.get_origin(one) is typing.Literal]
    members = [repr(member) for one in literals for member in typing.get_args(one)]
    return f"expected one of {', '.join(members)}" if members else ""


def whole(name: str, value: typing.SupportsIndex, *, hint: str = "for example 3") -> int:
    """Return a number of any integer type, of Python, NumPy or torch; refuse any other value."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(
            f"{name}={value!r} is a {type(value).__name__}, expected a whole number", hint=hint
        ) from None
