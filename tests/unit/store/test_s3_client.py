import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deltachain.errors import ConfigError, StorePermissionError
from deltachain.store import open_store
from deltachain.store.s3.client import make_client
from deltachain.store.s3.store import S3Store, open_s3
from tests.support.seaweed import Seaweed

SERVER = "http://127.0.0.1:1"
KEYS = {"key": "k", "secret": "s"}

PROFILES = f"""
[default]
region = eu-north-1
[profile own]
endpoint_url = {SERVER}
region = eu-west-3
[profile nested]
services = here
[services here]
s3 =
  endpoint_url = {SERVER}
[profile asks]
endpoint_url = {SERVER}
request_checksum_calculation = when_supported
"""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(PROFILES)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def checksums(client: Any) -> tuple[str, str]:
    config = client.meta.config
    return config.request_checksum_calculation, config.response_checksum_validation


# The endpoint, and the checksums that go with it

OWN = {**KEYS, "endpoint_url": SERVER}
REQUIRED, SUPPORTED = "when_required", "when_supported"
ASKED = {"request_checksum_calculation": SUPPORTED}
FOR_ANSWERS = {"AWS_RESPONSE_CHECKSUM_VALIDATION": SUPPORTED}
FOR_BOTH = {**FOR_ANSWERS, "AWS_REQUEST_CHECKSUM_CALCULATION": SUPPORTED}


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        (OWN, {}, (REQUIRED, REQUIRED)),
        ({"client_kwargs": {"endpoint_url": SERVER}}, {}, (REQUIRED, REQUIRED)),
        ({}, {"AWS_ENDPOINT_URL": SERVER}, (REQUIRED, REQUIRED)),
        ({}, {"AWS_ENDPOINT_URL_S3": SERVER}, (REQUIRED, REQUIRED)),
        (
            {},
            {"AWS_ENDPOINT_URL_S3": SERVER, "AWS_ENDPOINT_URL": "http://127.0.0.1:2"},
            (REQUIRED, REQUIRED),
        ),
        ({}, {"AWS_PROFILE": "own"}, (REQUIRED, REQUIRED)),
        ({"profile": "own"}, {}, (REQUIRED, REQUIRED)),
        ({"profile": "nested"}, {}, (REQUIRED, REQUIRED)),
        # The user has the last word.
        (OWN, FOR_ANSWERS, (REQUIRED, SUPPORTED)),
        (OWN, FOR_BOTH, (SUPPORTED, SUPPORTED)),
        ({"profile": "asks"}, FOR_ANSWERS, (SUPPORTED, SUPPORTED)),
        ({**OWN, "config_kwargs": ASKED}, FOR_ANSWERS, (SUPPORTED, SUPPORTED)),
    ],
)
def test_endpoint_by_any_means_has_plain_requests_unless_the_user_asks_for_others(
    monkeypatch: pytest.MonkeyPatch,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    expected: tuple[str, str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client, own = make_client({**KEYS, **options})
    assert own
    assert client.meta.endpoint_url == SERVER
    assert checksums(client) == expected
    # A server of the user's own has no name of its own for each bucket.
    url = client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "a"})
    assert url.startswith(f"{SERVER}/bucket/a?")


def test_aws_keeps_the_checksums_of_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    for ignored in (False, True):
        if ignored:
            monkeypatch.setenv("AWS_ENDPOINT_URL", SERVER)
            monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
        client, own = make_client(KEYS)
        assert not own
        assert ".amazonaws.com" in client.meta.endpoint_url
        assert checksums(client) == (SUPPORTED, SUPPORTED)
        assert client.meta.region_name == "eu-north-1"


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")
    monkeypatch.setenv("AWS_REGION", "us-west-1")
    monkeypatch.setenv("AWS_PROFILE", "own")
    options = {**KEYS, "token": "t", "endpoint_url": SERVER, "region": "eu-west-1"}
    client, _ = make_client(options)
    assert (client.meta.endpoint_url, client.meta.region_name) == (SERVER, "eu-west-1")
    found = client._request_signer._credentials
    assert (found.access_key, found.secret_key, found.token) == ("k", "s", "t")


def test_credentials_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    client, _ = make_client({})
    assert client._request_signer._credentials.access_key == "from-environment"


def test_credentials_of_a_file_are_read_again_once_it_is_replaced(
    seaweed: Seaweed, s3_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def hand_out(key: str, secret: str) -> None:
        new = tmp_path / "new"
        new.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")
        new.replace(file)

    valid = seaweed.options["key"], seaweed.options["secret"]
    hand_out(*valid)
    with closing(open_store(s3_url(), {"endpoint_url": seaweed.options["endpoint_url"]})) as store:
        store.put("a", b"first")
        hand_out("ended", "ended")
        with pytest.raises(StorePermissionError):
            store.put("a", b"refused")
        hand_out(*valid)
        store.put("a", b"second")
        file.write_text("[default]\naws_access_key_id=half")  # the last ones stay in use
        store.put("a", b"third")
        file.unlink()
        assert store.get("a") == b"third"


def test_client_does_not_retry_whatever_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "9")
    asked = {"retries": {"max_attempts": 7}, "proxies": {}}
    client, _ = make_client({**KEYS, "config_kwargs": asked, "deadline_s": 2})
    assert client.meta.config.retries["total_max_attempts"] == 1
    assert client.meta.config.read_timeout == 2


# What is refused


def test_no_credentials_says_where_they_are_looked_for() -> None:
    with pytest.raises(StorePermissionError) as caught:
        open_s3("s3://bucket", {"endpoint_url": SERVER}).get("a")
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


WITH_KEYS = "http://user:hushhush@127.0.0.1"
BAD_OPTIONS: tuple[dict[str, Any], ...] = (
    *({"profile": "no-such-profile"}, {"unknown": "hushhush"}, {"key": 1, "secret": "hushhush"}),
    *({"key": "hushhush"}, {"secret": "hushhush"}, {"client_kwargs": "hushhush"}),
    *({"config_kwargs": {"hushhush": 1}}, {"client_kwargs": {"hushhush": 1}}),
    *({"endpoint_url": "hushhush"}, {"endpoint_url": WITH_KEYS}),
    *({"client_kwargs": {"endpoint_url": WITH_KEYS}}, {"deadline_s": 0}, {"deadline_s": True}),
    *({"deadline_s": float("nan")}, {"deadline_s": "hushhush"}),
)
BAD_URLS = (
    *("s3://", "s3:///prefix", "s3:/bucket/prefix", "s3://a", "s3://user:hushhush@bucket/x"),
    *("s3://bucket:9000/x", "s3://bucket/x?token=hushhush", "s3://bucket/x#hushhush"),
    *("s3://bucket/a//b", "s3://bucket/a/../b", "s3://bucket/a b", "s3://bucket/a%20b"),
    *("s3://bucket/ä", f"s3://bucket/{'x' * 512}"),
)


@pytest.mark.parametrize(
    ("url", "options", "environment"),
    [
        *(("s3://bucket/x", options, "") for options in BAD_OPTIONS),
        *((url, KEYS, "") for url in BAD_URLS),
        ("s3://bucket/x", KEYS, WITH_KEYS),
    ],
    ids=str,
)
def test_bad_url_or_option_is_refused_and_not_shown(
    url: str, options: dict[str, Any], environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment:
        monkeypatch.setenv("AWS_ENDPOINT_URL", environment)
    with pytest.raises(ConfigError) as caught:
        open_store(url, options)
    assert "hushhush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://my.bucket-1/a/b=1/c", "s3://my.bucket-1/a/b=1/c"),
        ("s3://bucket/a/", "s3://bucket/a"),
        ("S3://bucket/A", "s3://bucket/A"),
    ],
)
def test_url_is_given_back(url: str, shown: str) -> None:
    opened = open_store(url, KEYS)
    assert isinstance(opened, S3Store)
    assert (opened.url, opened.requests) == (shown, 0)


# boto3 itself


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_boto3_is_loaded_by_the_first_s3_url() -> None:
    code = (
        "import sys, deltachain; from deltachain.store import open_store; "
        "open_store('memory://a'); print('boto3' in sys.modules); "
        "open_store('s3://bucket'); print('boto3' in sys.modules)"
    )
    assert run(code).split() == ["False", "True"]


def test_absent_boto3_is_named_with_the_extra() -> None:
    code = (
        "import sys; sys.modules['boto3'] = None; from deltachain.store import open_store\n"
        "from deltachain.errors import ConfigError\n"
        "try: open_store('s3://bucket')\n"
        "except ConfigError as error: print(error)\n"
    )
    output = run(code.replace("'boto3'", "'botocore'")) + run(code)
    assert output.count("s3:// stores need boto3") == 2
    assert output.count("pip install 'deltachain[s3]'") == 2
