"""Endpoints of Redis: which are taken, what of them is used, what refusals say."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rdzv.backends.redis import RedisBackend
from rdzv.backends.redis_client import RedisOptions
from rdzv.backends.redis_endpoint import client_factory
from rdzv.errors import RendezvousSettingsError


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("", "no endpoint"),
        ("http://host", "no endpoint"),
        ("unix://", "no endpoint"),
        ("host:port", "no host and port"),
        ("redis://host:99999999", "no host and port"),
        ("redis://host:-1", "no host and port"),
        ("redis://host:0", "port"),
        (":6379", "host is missing"),
        ("redis://", "host is missing"),
        ("redis:///0", "host is missing"),
        ("redis://user:word@/0", "host is missing"),
        ("redis://a:1,b:2", "several hosts"),
        ("redis://host/abc", "database"),
        ("redis://host/-1", "database"),
        ("redis://host/1/2", "database"),
        ("redis://host/1.0", "database"),
        ("redis://host/1?db=2", "database"),
        ("redis://host?db=abc", "database"),
        ("unix:///run/redis.sock?db=-1", "database"),
        ("redis+sentinel://host:26379", "name of a master"),
        ("redis+sentinel://host:x/mymaster", "no host and port"),
        ("redis+sentinel://host:0/mymaster", "port"),
        ("redis+sentinel://host,/mymaster", "host is missing"),
        ("redis+sentinel://host/mymaster/abc", "database"),
        ("redis+sentinel://host/mymaster?sentinel_ssl=true", "sentinel_ssl"),
        ("rediss+sentinel://host/mymaster?sentinel_ssl=perhaps", "sentinel_ssl"),
        ("redis+cluster://", "host is missing"),
        ("redis+cluster://host/1", "database 0 only"),
        ("redis+cluster://host?db=1", "database 0 only"),
        ("redis+cluster://host/abc", "database"),
        ("redis://host?ssl_ca_certs=/etc/ca.pem", "rediss"),
        ("unix:///run/redis.sock?ssl_ca_certs=/etc/ca.pem", "rediss"),
        ("rediss://host?ssl_nonsense=1", "unknown"),
        ("rediss+sentinel://host/mymaster?ssl_nonsense=1", "unknown"),
        ("rediss+cluster://host?ssl_nonsense=1", "unknown"),
        ("rediss://host?ssl_cert_reqs=nonsense", "unknown"),
    ],
)
def test_endpoints_that_cannot_work_are_refused(endpoint: str, says: str) -> None:
    with pytest.raises(RendezvousSettingsError, match=says):
        RedisBackend(endpoint, "run")


@pytest.mark.parametrize(
    ("endpoint", "route"),
    [
        ("host", ("host", 6379)),
        ("host:7", ("host", 7)),
        ("host:7/1", ("host", 7)),
        ("redis://host/2", ("host", 6379)),
        ("redis://[::1]:7/2/", ("::1", 7)),
        ("rediss://u:p@host:8", ("host", 8)),
        ("unix:///run/redis.sock?db=1", None),
        ("redis+sentinel://a:1,b:2/mymaster/0", ("a", 1)),
        ("redis+cluster://a,b:2", ("a", 6379)),
        ("redis+cluster://a,b:2/0", ("a", 6379)),
    ],
)
def test_every_documented_kind_of_endpoint_is_taken(endpoint: str, route: object) -> None:
    assert RedisBackend(endpoint, "run").route() == route


@pytest.mark.parametrize(
    "endpoint",
    [
        "redis://user:hunter22/x@host:6379",
        "redis+sentinel://user:hunter22/x@host:1/m",
        "redis+cluster://user:hunter22/x@h:26379",
        "redis://user:hunter22\u2100@host",
        "redis://:hunter22[a]@host",
        "redis://user:hunter22@host/abc",
        "redis+sentinel://host/m/abc?sentinel_password=hunter22",
    ],
)
def test_a_refusal_shows_no_password(endpoint: str) -> None:
    said, cause = shown_of(endpoint)
    assert "hunter22" not in said
    assert cause is None
    assert "hunter22" not in repr(RedisOptions(password="hunter22"))


def shown_of(endpoint: str) -> tuple[str, BaseException | None]:
    """What is said of an endpoint: in the refusal and its cause, or where it is shown later."""
    try:
        return RedisBackend(endpoint, "run").endpoint, None
    except RendezvousSettingsError as error:
        return str(error), error.__cause__


def connecting(endpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """With what the master of a Sentinel group is connected to, and with what the Sentinels."""
    make, _ = client_factory(endpoint, RedisOptions(), b"key")
    pool = make(1.0).connection_pool
    (sentinel, *_) = pool.sentinel_manager.sentinels
    return pool.connection_kwargs, sentinel.connection_pool.connection_kwargs


def test_the_query_of_a_sentinel_endpoint_counts(caplog: pytest.LogCaptureFixture) -> None:
    query = "db=3&client_name=me&sentinel_username=watcher&sentinel_password=w%40rd&protocol=3"
    master, sentinel = connecting(f"redis+sentinel://u:p@a,b/mymaster?{query}")
    assert {
        "db": 3,
        "client_name": "me",
        "username": "u",
        "password": "p",
    }.items() <= master.items()
    assert (sentinel["username"], sentinel["password"]) == ("watcher", "w@rd")
    assert sentinel["client_name"] is None
    assert [record.getMessage() for record in caplog.records] == [
        "of the endpoint's options these are not used: protocol"
    ]


def test_sentinels_get_no_credentials_of_the_server() -> None:
    _, sentinel = connecting("redis+sentinel://u:p@a/mymaster")
    assert (sentinel.get("username"), sentinel.get("password")) == (None, None)


@pytest.mark.parametrize(("query", "over_tls"), [("", True), ("&sentinel_ssl=false", False)])
def test_sentinels_are_asked_over_tls_as_well(query: str, over_tls: bool) -> None:
    master, sentinel = connecting(f"rediss+sentinel://a/mymaster?ssl_ca_certs=/etc/ca.pem{query}")
    assert master["ssl_ca_certs"] == "/etc/ca.pem"
    assert (sentinel.get("ssl_ca_certs") == "/etc/ca.pem") is over_tls


@pytest.mark.parametrize(
    ("query", "checked"),
    [
        ("", True),
        ("ssl_cert_reqs=required", True),
        ("ssl_check_hostname=false", False),
        ("ssl_cert_reqs=none", False),
    ],
)
@pytest.mark.parametrize("kind", ["rediss://a", "rediss+sentinel://a/mymaster"])
def test_the_name_of_a_server_is_checked(kind: str, query: str, checked: bool) -> None:
    make, _ = client_factory(f"{kind}?{query}", RedisOptions(), b"key")
    assert bool(make(1.0).connection_pool.connection_kwargs.get("ssl_check_hostname")) is checked


@pytest.mark.parametrize("options", ["host=x", "port=1", "path=/x", "connection_class=x"])
def test_a_query_cannot_change_where_it_leads(
    options: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert RedisBackend(f"redis://host?{options}", "run").route() == ("host", 6379)
    assert "not used" in caplog.text


@pytest.mark.parametrize(
    "prefix", ["", " ", "a b", "a{b", "a}", "a\n", "a\0", "\udc80", "a\u2003b", "x" * 129]
)
def test_an_odd_key_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(RendezvousSettingsError, match="key_prefix"):
        RedisBackend("host", "run", RedisOptions(key_prefix=prefix))


@pytest.mark.parametrize("prefix", ["r", "team-1:rdzv", "\u00fcn\u00efc\u00f6de", "x" * 128])
def test_a_plain_key_prefix_is_taken(prefix: str) -> None:
    assert RedisBackend("host", "run", RedisOptions(key_prefix=prefix)).name == "redis"
