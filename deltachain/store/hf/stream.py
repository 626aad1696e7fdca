"""One stream of a bucket's feed: the request, and the judgement of its status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

from deltachain.store.hf.api import Hub, told_to_wait

SILENCE_S: Final = 75.0
"""Seconds without a byte after which a stream is dead: the Hub sends a comment every 30 s."""

_CONNECT_S: Final = 10.0


class AbsentFeedError(Exception):
    """The Hub has no feed for this bucket or token; another attempt would change nothing."""


class RefusedCursorError(Exception):
    """The Hub does not accept the cursor."""


class FeedUnavailableError(Exception):
    """The Hub answered with another status.

    Args:
        words: Path and status.
        wait_s: Seconds to wait, as the Hub says; 0 if it does not.
    """

    def __init__(self, words: str, wait_s: float) -> None:
        super().__init__(words)
        self.wait_s = wait_s


@contextmanager
def open_stream(hub: Hub, parameters: Mapping[str, str]) -> Iterator[Any]:
    """Yield the response with the events of a bucket, which ends after ``SILENCE_S`` of silence.

    It takes one request of the rate limit. Errors of the HTTP library pass through.

    Args:
        hub: Client of the bucket.
        parameters: ``cursor``, the place to resume after; or none, for later changes only.

    Raises:
        AbsentFeedError: There is no feed.
        RefusedCursorError: The Hub does not accept the cursor.
        FeedUnavailableError: The Hub cannot serve the feed now.
        StoreUnavailableError: The rate limit allows no request now.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers, get_session  # noqa: PLC0415

    hub.admit(hub.deadline().shorter(0.0))
    session: Any = get_session()
    headers = build_hf_headers(token=hub.place.token, library_name="deltachain")
    times = {"connect": _CONNECT_S, "pool": _CONNECT_S, "write": _CONNECT_S, "read": SILENCE_S}
    request = session.build_request(
        "GET",
        f"{hub.root}/events",
        params=dict(parameters),
        headers=headers | {"Accept": "text/event-stream", "Accept-Encoding": "identity"},
        extensions={"timeout": times},
    )
    try:
        response = session.send(request, stream=True, follow_redirects=False)
    except OfflineModeIsEnabled as exc:
        raise AbsentFeedError(str(exc)) from exc
    with closing(response):
        _check(response)
        yield response


def _check(response: Any) -> None:  # noqa: ANN401 - of httpx or httpx2
    """Raise unless a response is a stream of events; see ``open_stream``."""
    status, headers = response.status_code, response.headers
    words = f"{response.request.url.path}: {status}"
    if status in (401, 403, 404, 501):
        raise AbsentFeedError(words)
    if status == 400:
        raise RefusedCursorError(words)
    coding = headers.get("Content-Encoding", "identity").strip().lower()
    if status != 200 or coding != "identity":
        raise FeedUnavailableError(words, told_to_wait(headers))
    if not headers.get("Content-Type", "").lower().startswith("text/event-stream"):
        raise AbsentFeedError(f"{words}, and no stream of events")
