"""Environment variables: name, meaning and parser of each ``DELTACHAIN_*`` variable.

Unknown names and invalid values are errors, so that a misspelled setting fails at the start.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

from deltachain.errors import ConfigError, DeltaChainError, EngineDamagedError

logger = logging.getLogger(__name__)

PREFIX: Final = "DELTACHAIN_"

TRUE: Final = ("1", "true", "yes", "on")
FALSE: Final = ("0", "false", "no", "off")

_KUBERNETES: Final = re.compile(
    r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)?)"
)
"""Variables that Kubernetes sets in a pod for a service whose name begins with ``deltachain``."""

_ADDRESS: Final = re.compile(r"(?:tcp|udp|sctp)://.+")


class Variable(NamedTuple):
    """Meaning of a variable, and its parser, which raises ``ValueError`` with the expected form."""

    meaning: str
    parse: Callable[[str], Any]


def read(environment: Mapping[str, str]) -> dict[str, Any]:
    for _, mistake in mistakes(environment):
        raise mistake
    ours = _ours(environment)
    return {name: VARIABLES[name].parse(text) for name, text in ours.items() if text}


def mistakes(environment: Mapping[str, str]) -> Iterator[tuple[str, ConfigError]]:
    ours = _ours(environment)
    for name, text in ours.items():
        if name not in VARIABLES:
            yield PREFIX + name, _unknown(PREFIX + name)
        elif text:
            try:
                VARIABLES[name].parse(text)
            except ValueError as exc:
                yield PREFIX + name, _invalid(name, text, exc)
    for name in FROM_FILE:
        if ours.get(name) and ours.get(f"{name}_FILE"):
            both = f"{PREFIX}{name} and {PREFIX}{name}_FILE are both set"
            hint = "unset one of them; only the file can be changed while a program runs"
            yield PREFIX + name, ConfigError(both, hint=hint)


def read_one(environment: Mapping[str, str], name: str) -> Any:  # noqa: ANN401 - as it is parsed
    return read(environment).get(name)


def read_secret(environment: Mapping[str, str], name: str) -> str | Path:
    """Return a secret (``TOKEN``, ``ENGINE_KEY``), the file that holds it, or nothing."""
    given = read(environment)
    found: str | Path = given.get(f"{name}_FILE") or given.get(name, "")
    return found


def is_strict(environment: Mapping[str, str]) -> bool:
    """Return whether a server that cannot follow must exit; other variables may be invalid."""
    strict = environment.get(f"{PREFIX}STRICT", "").lower() not in FALSE
    return bool(environment.get(f"{PREFIX}URL")) and strict


def refused(exc: DeltaChainError) -> SystemExit:
    """Log why a server cannot follow its chain, rather than let it serve; return its exit."""
    told = f"deltachain cannot follow the chain, so this server exits: {exc}"
    if not isinstance(exc, EngineDamagedError):
        told += f"\n  set {PREFIX}STRICT=0 to serve the loaded weights instead"
    logger.error("%s", told)
    return SystemExit(exc.exit_code)


def _ours(environment: Mapping[str, str]) -> dict[str, str]:
    names = {full: full.removeprefix(PREFIX) for full in environment if full.startswith(PREFIX)}
    return {
        name: environment[full]
        for full, name in names.items()
        if not _is_of_kubernetes(name, environment[full])
    }


def _is_of_kubernetes(name: str, text: str) -> bool:
    told = _KUBERNETES.fullmatch(name) is not None
    return told and (not name.endswith("PORT") or "SERVICE" in name or bool(_ADDRESS.match(text)))


def _unknown(full: str) -> ConfigError:
    known = [PREFIX + name for name in VARIABLES]
    near = get_close_matches(full.upper(), known, 1, 0.0)[0]
    return ConfigError(
        f"{full} is not a known variable",
        hint=f"the nearest name is {near}: {VARIABLES[near.removeprefix(PREFIX)].meaning}",
    )


def _invalid(name: str, text: str, why: ValueError) -> ConfigError:
    is_short = len(text) <= _SHOWN and name not in SECRETS
    shown = f"{text!r}" if is_short else "set to another value"
    meaning = VARIABLES[name].meaning
    return ConfigError(f"{PREFIX}{name} is {shown}, expected {why}", hint=f"meaning: {meaning}")


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
    line = text.strip()
    if not line or not line.isprintable():
        raise ValueError("one line of text")
    return line


def _group(text: str) -> tuple[str, int]:
    name, _, count = text.partition("@")
    if not re.fullmatch(r"[A-Za-z0-9-]{1,100}@[0-9]{1,4}", text) or int(count) < 2:
        raise ValueError("a name of letters, digits and -, @ and a number above 1: policy@4")
    return name, int(count)


def _place(text: str) -> str:
    if text not in PLACES:
        raise ValueError(" or ".join(PLACES))
    return text


VARIABLES: Final[Mapping[str, Variable]] = {
    "URL": Variable("URL of the chain that a server follows", _line),
    "DRAFT_URL": Variable("URL of the chain that the draft model of a server follows", _line),
    "FOLLOW": Variable("whether the server applies versions as they are committed", _switch),
    "STRICT": Variable("whether a server that cannot follow exits at startup", _switch),
    "PAUSE": Variable("treatment of running requests during a swap", _line),
    "TOKEN": Variable("bearer token that callers of the routes must send", _line),
    "TOKEN_FILE": Variable("file with such tokens, one a line, read again when it changes", Path),
    "MAX_LAG": Variable("largest lag, in versions, of a server that reports ready", _count),
    "MAX_SILENCE_S": Variable(
        "largest time, in seconds, without an answer of the store, of a server that reports ready",
        _seconds,
    ),
    "BASE": Variable("local folder of the chain's base checkpoint", Path),
    "STAGE_BUDGET": Variable("bytes of staged and undo bits", _count),
    "POLL_S": Variable("seconds between polls for a new version", _seconds),
    "SPOOL": Variable("folder of fetched objects, shared by the processes of a host", Path),
    "PROOFS": Variable("folder of layouts proven before, or off; one beside the spools", _line),
    "DECODE": Variable("where ranks decode changes, host or device", _place),
    "SIGNING_KEY": Variable("file of the private key with which a publisher signs", Path),
    "TRUSTED_KEYS": Variable(
        "public keys that readers trust: a list with commas, or a file with one key a line", _line
    ),
    "MIRROR": Variable(
        "whether the URL is a mirror, which may not have the held version yet", _switch
    ),
    "MAX_HEARTBEAT_AGE_S": Variable(
        "largest age, in seconds, of the publisher's last sign: its newest version or heartbeat",
        _seconds,
    ),
    "HF_CALLS": Variable("limit of requests to the Hub in 5 minutes", lambda text: _count(text, 1)),
    "ENGINES": Variable(
        "addresses of the replicas of a fleet: a list with commas, or a file with one a line", _line
    ),
    "PRESENCE_URL": Variable(
        "URL, apart from the chain, at which a replica writes its presence", _line
    ),
    "TOGETHER": Variable(
        "name and size of a group of replicas that stay within one version of each other", _group
    ),
    "ENGINE_KEY": Variable("API key of the engines, for fleet and agent", _line),
    "ENGINE_KEY_FILE": Variable(
        "file with such keys, one a line, read again when it changes", Path
    ),
    "CLIENT_CERT": Variable("file of the client certificate for TLS, in PEM format", Path),
    "CLIENT_KEY": Variable("file of its private key, if it is not in the same file", Path),
    "VENVS": Variable("folder of the virtual environments of engine tests", Path),
}

_SHOWN: Final = 5  # characters of a wrong value: a longer one may be the secret of another variable
PLACES: Final = ("host", "device")  # of DECODE; by default, where the weights are
SECRETS: Final = ("TOKEN", "ENGINE_KEY")  # variables whose values are never printed
FROM_FILE: Final = SECRETS  # variables that exclude another one, of the same name and _FILE
