"""What the environment may say: every ``DELTACHAIN_*`` variable, what it means, and its values.

A name that is not listed here, or a value that means nothing, is refused: whoever misspells a
setting should learn it at the start, not from what a server then does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from deltachain.errors import ConfigError

PREFIX: Final = "DELTACHAIN_"

TRUE: Final = ("1", "true", "yes", "on")
FALSE: Final = ("0", "false", "no", "off")

_KUBERNETES: Final = re.compile(
    r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)?)"
)
"""What a pod is told of a service whose name begins with ``deltachain``: nobody chose those."""

_ADDRESS: Final = re.compile(r"(?:tcp|udp|sctp)://.+")


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable.

    Attributes:
        meaning: What it decides.
        parse: Makes a value of its text; raises :class:`ValueError` with what was expected.
    """

    meaning: str
    parse: Callable[[str], Any]


def read(environment: Mapping[str, str]) -> dict[str, Any]:
    """Every variable that is given and not empty, parsed, by its name without the prefix.

    Raises:
        ConfigError: A name is not known, or a value means nothing.
    """
    found: dict[str, Any] = {}
    for full, text in environment.items():
        name = full.removeprefix(PREFIX)
        if name == full or _is_of_kubernetes(name, text):
            continue
        if name not in VARIABLES:
            raise _unknown(full)
        if text:
            found[name] = _parsed(name, text)
    return found


def read_one(environment: Mapping[str, str], name: str) -> Any:  # noqa: ANN401 - as it is parsed
    """One variable, parsed; ``None`` where it is absent or empty.

    Raises:
        ConfigError: Its value means nothing.
    """
    text = environment.get(PREFIX + name, "")
    return _parsed(name, text) if text else None


def is_strict(environment: Mapping[str, str]) -> bool:
    """Whether a server that cannot follow its chain should end at its start.

    So it should where a chain is named, unless ``STRICT`` says no; also where something else in the
    environment means nothing.
    """
    strict = environment.get(f"{PREFIX}STRICT", "").lower() not in FALSE
    return bool(environment.get(f"{PREFIX}URL")) and strict


def _is_of_kubernetes(name: str, text: str) -> bool:
    told = _KUBERNETES.fullmatch(name) is not None
    return told and (not name.endswith("PORT") or "SERVICE" in name or bool(_ADDRESS.match(text)))


def _unknown(full: str) -> ConfigError:
    known = [PREFIX + name for name in VARIABLES]
    near = get_close_matches(full.upper(), known, 1, 0.0)[0]
    return ConfigError(
        f"{full} is set, and means nothing",
        hint=f"the nearest that does is {near}: {VARIABLES[near.removeprefix(PREFIX)].meaning}",
    )


def _parsed(name: str, text: str) -> Any:  # noqa: ANN401
    variable = VARIABLES[name]
    try:
        return variable.parse(text)
    except ValueError as exc:
        shown = "set to something else" if name in SECRETS else f"{text!r}"
        raise ConfigError(
            f"{PREFIX}{name} is {shown}, not {exc}", hint=f"it means: {variable.meaning}"
        ) from exc


def _switch(text: str) -> bool:
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError(f"one of {', '.join((*TRUE, *FALSE))}")


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("a number")
    return number


def _seconds(text: str) -> float:
    number = _number(text)
    if number <= 0:
        raise ValueError("a number of seconds above 0")
    return number


def _count(text: str, least: int = 0) -> int:
    number = _number(text)
    if number < least or number != int(number):
        raise ValueError(f"a whole number, at least {least}")
    return int(number)


def _line(text: str) -> str:
    """What is around it came with a file or a quotation, and is no part of it."""
    line = text.strip()
    if not line or not line.isprintable():
        raise ValueError("one line of text")
    return line


VARIABLES: Final[Mapping[str, Variable]] = {
    "URL": Variable("the chain that a server follows", _line),
    "FOLLOW": Variable("whether it applies versions as they are committed", _switch),
    "STRICT": Variable("whether a server that cannot follow ends at its start", _switch),
    "PAUSE": Variable("what becomes of running requests in a swap", _line),
    "KEEP_CACHE": Variable("whether cached prefixes outlive a swap", _switch),
    "TOKEN": Variable("what callers of the routes must know", _line),
    "MAX_LAG": Variable("versions behind the newest up to which a server is ready", _count),
    "BASE": Variable("where the chain's base checkpoint lies here", Path),
    "STAGE_BUDGET": Variable("bytes of staged and undo bits", _count),
    "POLL_S": Variable("seconds between looks for a new version", _seconds),
    "SPOOL": Variable("a folder that the leader and all ranks see", Path),
    "HF_CALLS": Variable("requests to the Hub in five minutes", lambda text: _count(text, 1)),
    "ENGINE_KEY": Variable("the API key of engines, for fleet and agent", _line),
    "VENVS": Variable("where the environments of engine tests lie", Path),
    "TEST_STRIKE": Variable("for tests: a file that says what goes wrong", str),
    "TEST_RENDEZVOUS": Variable("for tests: where ranks meet", str),
}

SECRETS: Final = ("TOKEN", "ENGINE_KEY")
"""Whose values nobody is shown."""
