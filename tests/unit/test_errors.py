"""No secret in a message: see rdzv.errors."""

from __future__ import annotations

import time

import pytest
from torch.distributed.elastic.rendezvous import api

from rdzv import errors
from rdzv.errors import mask_secrets, secrets_in

SECRET = "hunter22"


@pytest.mark.parametrize(
    "text",
    [
        f"redis://user:{SECRET}@host:6379/0",
        f"rediss://:{SECRET}@host",
        f"postgresql+psycopg://user:{SECRET}@[::1]:5432/db",
        f"user:{SECRET}@host:5432/db",
        f"postgresql://user:a/{SECRET}?#@host/db",
        f"postgresql://user:{SECRET}@{SECRET}@host/db",
        f"redis://a=b:{SECRET}@host",
        f"redis://user:{SECRET}@h1:1,redis://user:{SECRET}@h2:2",
        f"a:{SECRET}@h1,redis://b:{SECRET}@h2",
        f"endpoint='redis://user:{SECRET}@host'",
        f"connect(redis://user:{SECRET}@host) failed:\nredis://user:{SECRET}@host",
        f"redis://host/0?password={SECRET}",
        f"redis://host/0?db=1&Password={SECRET}&x=1",
        f"host=h password={SECRET} dbname=d",
        f"host=h password='{SECRET} with blanks {SECRET}' dbname=d",
        f"host=h password='it\\'s {SECRET}' dbname=d",
        f"host=h sslpassword={SECRET}",
        f"{{'password': '{SECRET}', 'db': 1}}",
        f'{{"auth_token": "{SECRET}", "db": 1}}',
        f"{{'password': b'{SECRET}'}}",
        f"REDIS_PASS={SECRET} REDIS_PASSWORD={SECRET} pw={SECRET}",
        f"--passwd={SECRET} --api-key={SECRET} --secret: {SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"access_key = {SECRET}",
        f"password=;,'{SECRET}",
        f"password='{SECRET}",
    ],
)
def test_secrets_by_their_place(text: str) -> None:
    masked = mask_secrets(text)
    assert SECRET not in masked
    assert "***" in masked
    assert SECRET not in mask_secrets(masked)


@pytest.mark.parametrize(
    "text",
    [
        "redis://host:6379/0",
        "redis://[::1]:6379/0",
        "mysql://user@host/db",
        "/tmp/job.db",
        "password_file=/run/secrets/redis cannot be read",
        "sslrootcert=/etc/ssl/ca.pem secret_path: /run/x",
        "Access denied for user 'u'@'h' (using password: YES)",
        "password authentication failed for user u",
        "bypass the pass of 2:30",
        "node-1:9 and node-2:9",
        "",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert mask_secrets(text) == text


def test_what_helps_stays() -> None:
    assert mask_secrets(f"redis://u:{SECRET}@host:1/0?db=2") == "redis://u:***@host:1/0?db=2"
    assert mask_secrets(f"u:{SECRET}@host:1/db refused") == "u:***@host:1/db refused"


def test_known_secrets_are_masked_wherever_they_stand() -> None:
    text = "no such host: p@ss, p%40ss or ss"
    assert mask_secrets(text, "p@ss", None, "", "p%40ss") == "no such host: ***, *** or ss"
    assert mask_secrets("longer secret", "long", "longer") == "*** secret"


def test_short_known_secrets_do_not_garble() -> None:
    assert mask_secrets("a message", "a") == "a message"


def test_secrets_of_an_endpoint() -> None:
    assert secrets_in("redis://u:p%40ss@h/0?password=x%2By&db=1") == (
        "p%40ss",
        "p@ss",
        "x%2By",
        "x+y",
    )
    assert secrets_in("redis://:only@h") == ("only",)
    assert secrets_in("redis://h:6379/0") == ()
    assert secrets_in("") == ()


@pytest.mark.parametrize(
    "unit",
    ["a:", "a:@", "password", "password: ", "password='", "token-", "pass", "://", "\\", "'"],
)
def test_masking_a_hostile_text_takes_linear_time(unit: str) -> None:
    def seconds(repetitions: int) -> float:
        text = unit * repetitions + "@"
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            mask_secrets(text)
            secrets_in(text)
            best = min(best, time.process_time() - began)
        return best

    # Twenty times the text: a quadratic search would take 400 times as long.
    assert seconds(20_000) < 100 * seconds(1_000) + 0.05


def test_the_types_are_torchs() -> None:
    for name in ("Closed", "Connection", "GracefulExit", "State", "Timeout"):
        kind = f"Rendezvous{name}Error"
        assert getattr(errors, kind) is getattr(api, kind)
    assert issubclass(errors.RendezvousSettingsError, api.RendezvousError)
    assert issubclass(errors.RendezvousSettingsError, ValueError)
