"""Requests and replies of the control plane, shared by servers, clients and OpenAPI documents."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

from deltachain.status import Answer, Status

if TYPE_CHECKING:  # imports numpy, which `deltachain fleet` does without
    from deltachain.types import Version

PREFIXES: Final = ("/v1/deltachain", "/deltachain")
"""Path prefix of the routes. vLLM's API key guards the paths below ``/v1``."""

TOKEN_HEADER: Final = "x-deltachain-token"  # noqa: S105 - its name
"""Header of the token, for requests whose ``Authorization`` holds the engine's own key."""


_LARGEST: Final = (1 << 53) - 1

_Integer: TypeAlias = (  # JSON has one type of number: 7.0 equals the integer 7
    Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
    | Annotated[float, msgspec.Meta(ge=0, le=_LARGEST, multiple_of=1)]
)


class VersionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The requested version; by default the head, or for a rollback the previous one.

    With ``manifest``, blake3 of its manifest, an update is refused for another version of that
    number, and succeeds if the replica holds a later one of the same history.
    """

    version: _Integer | None = None
    manifest: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""

    @property
    def number(self) -> "Version | None":
        return None if self.version is None else int(self.version)


class Ready(Answer, frozen=True):
    """Readiness of a replica for requests, and the reason if it is not ready."""

    ready: bool
    reason: str
    version: int | None = None


class Problem(Answer, frozen=True):
    type: str  # name of a class in deltachain.errors
    message: str
    hint: str  # action that resolves the error
    retryable: bool  # whether the same request may succeed later


class RefusedReply(Answer, frozen=True):
    error: Problem


class Detail(Answer, frozen=True):
    """Reply of a server that refused the request, or has no replica."""

    detail: str


def schema_of(kind: type) -> dict[str, Any]:
    (found,), words = msgspec.json.schema_components([kind], ref_template="{name}")
    filled: dict[str, Any] = _fill(found, words)
    return filled


def answers(
    *codes: int, kinds: Mapping[int, type | None] = MappingProxyType({})
) -> dict[int | str, dict[str, Any]]:
    """Describe the responses of a route for OpenAPI: a status, an error, or given types."""
    found: dict[int | str, dict[str, Any]] = {}
    for code in (200, 401, 403, 503, *codes):
        kind = kinds.get(code, _KINDS.get(code, RefusedReply))
        found[code] = {"description": _ABOUT.get(code, "refused")}
        if kind is not None:
            schemas = [schema_of(kind)]
            if code == 503:  # the store is unavailable, or the server has no replica
                schemas.append(schema_of(Detail))
            found[code]["content"] = {"application/json": {"schema": {"anyOf": schemas}}}
    return found


_KINDS: Final = {200: Status, 401: Detail, 403: Detail, 413: Detail, 422: Detail}
_ABOUT: Final = {200: "success", 401: "wrong or missing token", 403: "the server has no token"}


def _fill(part: Any, words: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(part, dict):
        if "$ref" in part:
            return _fill(words[part["$ref"]], words)
        return {key: _fill(value, words) for key, value in part.items()}
    if isinstance(part, list):
        return [_fill(one, words) for one in part]
    return part
