"""What a follower and an agent say of themselves, without an engine."""

from __future__ import annotations

import shutil
from pathlib import Path

from deltachain.errors import ControlPlaneError
from deltachain.presence.writer import follower_status
from deltachain.publish import PublishConfig, Publisher
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.models import TinyModel


def test_a_follower_without_its_folder_and_an_agent_without_its_server_are_not_ready(
    tmp_path: Path,
) -> None:
    url, folder = str(tmp_path / "chain"), tmp_path / "out"
    with Publisher(PublishConfig(url=url)) as publisher:
        publisher.attach(TinyModel())
        publisher.flush()
    with Subscriber(SubscribeConfig(url=url), folder) as subscriber:
        subscriber.update()
        assert follower_status(subscriber, {}, engine="follow", trouble=None).ready
        away = ControlPlaneError("http://127.0.0.1:1 does not answer")
        status = follower_status(subscriber, {}, engine="agent", trouble=away)
        assert (status.ready, status.reason) == (False, "http://127.0.0.1:1 does not answer")
        shutil.rmtree(folder)
        status = follower_status(subscriber, {}, engine="follow", trouble=None)
        assert not status.ready
        assert "was removed" in status.reason
