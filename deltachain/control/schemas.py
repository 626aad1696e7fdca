"""What is said over the control plane, by servers and clients, and in their documents."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from deltachain.replica.status import Answer, ReplicaStatus
from deltachain.types import Version

PREFIXES: Final = ("/v1/deltachain", "/deltachain")
"""Where the routes are: in vLLM, whose API key guards what lies below ``/v1``, and in SGLang."""

TOKEN_HEADER: Final = "x-deltachain-token"  # noqa: S105 - its name
"""Takes the token where ``Authorization`` holds the engine's own key."""


_LARGEST: Final = (1 << 53) - 1

_Integer: TypeAlias = (  # JSON knows one kind of number: 7.0 is the integer 7
    Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
    | Annotated[float, msgspec.Meta(ge=0, le=_LARGEST, multiple_of=1)]
)


class VersionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which version; the head, or the one before, when none is named.

    Attributes:
        version: Its number.
        manifest: The blake3 of its manifest, for an update: the replica then refuses another
            version of that number, and says so if it holds a later one of the same history.
    """

    version: _Integer | None = None
    manifest: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""

    @property
    def number(self) -> Version | None:
        """It, as a number of a version."""
        return None if self.version is None else int(self.version)


class Ready(Answer, frozen=True):
    """Whether a replica should be sent requests, and why not."""

    ready: bool
    reason: str
    version: int | None = None


class Problem(Answer, frozen=True):
    """Why a replica did not do what it was told.

    Attributes:
        type: Name of a class of :mod:`deltachain.errors`.
        message: What happened.
        hint: What to do now.
        retryable: Whether the same request may work later.
    """

    type: str
    message: str
    hint: str
    retryable: bool


class RefusedReply(Answer, frozen=True):
    """The answer of a replica that could not."""

    error: Problem


class Detail(Answer, frozen=True):
    """The answer of a server that lets nobody ask, or has no replica to ask."""

    detail: str


def schema_of(kind: type) -> dict[str, Any]:
    """The JSON schema of a word, with every reference filled in."""
    (found,), words = msgspec.json.schema_components([kind], ref_template="{name}")
    filled: dict[str, Any] = _fill(found, words)
    return filled


def answers(
    *codes: int, kinds: Mapping[int, type | None] = MappingProxyType({})
) -> dict[int | str, dict[str, Any]]:
    """What a route answers with, for its documents: the status, or a refusal.

    Args:
        codes: Of further refusals.
        kinds: What else is answered with a code; ``None`` for no JSON.
    """
    found: dict[int | str, dict[str, Any]] = {}
    for code in (200, 401, 403, 503, *codes):
        kind = kinds.get(code, _KINDS.get(code, RefusedReply))
        found[code] = {"description": _ABOUT.get(code, "refused")}
        if kind is not None:
            schemas = [schema_of(kind)]
            if code == 503:  # the store does not answer, or there is no replica here to ask
                schemas.append(schema_of(Detail))
            found[code]["content"] = {"application/json": {"schema": {"anyOf": schemas}}}
    return found


_KINDS: Final = {200: ReplicaStatus, 401: Detail, 403: Detail, 413: Detail, 422: Detail}
_ABOUT: Final = {200: "done", 401: "wrong or missing token", 403: "no token is set here"}


def _fill(part: Any, words: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(part, dict):
        if "$ref" in part:
            return _fill(words[part["$ref"]], words)
        return {key: _fill(value, words) for key, value in part.items()}
    if isinstance(part, list):
        return [_fill(one, words) for one in part]
    return part
