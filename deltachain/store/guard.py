"""Boundary of a store: converts any exception of its library to an error of deltachain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, TypeVar

from deltachain.errors import DeltaChainError, StoreUnavailableError

_S = TypeVar("_S", bound=type)

_CALLS: Final = (
    "get",
    "read",
    "get_range",
    "put",
    "upload",
    "reveal",
    "put_if_absent",
    "find",
    "find_all",
    "delete",
)
_HINT: Final = (
    "the library of this store or what answered it is at fault; if it happens again, report it "
    "with the traceback"
)


def guarded(store: _S) -> _S:
    """Decorate a store class so that its methods raise only a ``DeltaChainError``.

    A store converts expected errors itself; this covers unexpected ones: endless recursion in a
    library, a response that crashes its parser, thread exhaustion. A failed assertion is a bug of
    deltachain and passes through.
    """
    for name in _CALLS:
        setattr(store, name, _guarded_call(getattr(store, name)))
    setattr(store, "list", _guarded_list(getattr(store, "list")))  # noqa: B009, B010 - as above
    return store


def _guarded_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def guarding(store: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with _errors_named(store, args[0] if args else ""):
            return call(store, *args, **kwargs)

    return guarding


def _guarded_list(call: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @wraps(call)
    def guarding(store: Any, prefix: str = "") -> Iterator[Any]:  # noqa: ANN401
        with _errors_named(store, prefix):
            return _guarded_rows(store, prefix, call(store, prefix))

    return guarding


def _guarded_rows(store: Any, prefix: str, rows: Iterator[Any]) -> Iterator[Any]:  # noqa: ANN401
    with _errors_named(store, prefix):
        yield from rows


@contextmanager
def _errors_named(store: Any, key: object) -> Iterator[None]:  # noqa: ANN401
    try:
        yield
    except (DeltaChainError, AssertionError):
        raise
    except Exception as exc:
        named = key if isinstance(key, str) else ""
        about = f"object {named!r} in {store.url}" if named else str(store.url)
        raise StoreUnavailableError(
            f"{about}: unexpected {type(exc).__name__}", key=named, url=store.url, hint=_HINT
        ) from exc
