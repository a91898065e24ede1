"""Every option of a user, checked once: see rdzv.settings."""

from __future__ import annotations

import logging
import math
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from rdzv.errors import RendezvousError, RendezvousSettingsError
from rdzv.settings import (
    DURATION_SECONDS_MAX,
    ENDPOINT_CHARACTERS_MAX,
    KEEP_ALIVE_ATTEMPTS_MAX,
    OPTIONS,
    PASSWORD_BYTES_MAX,
    RUN_ID_BYTES_MAX,
    Settings,
    resolve_endpoint,
)
from rdzv.state import NODES_MAX

DURATIONS = (
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "read_timeout",
    "outage_timeout",
    "closed_grace",
)


def parameters(
    *,
    backend: str = "sqlite",
    endpoint: str = "/tmp/job.db",
    run_id: Any = "job",
    nodes: tuple[Any, Any] = (1, 4),
    local_addr: Any = None,
    **options: Any,
) -> RendezvousParameters:
    # Set afterwards: torch's own constructor refuses a part of what is refused here.
    params = RendezvousParameters(backend, endpoint, run_id, 1, 1, local_addr, **options)
    params.min_nodes, params.max_nodes = nodes
    return params


def settings(**given: Any) -> Settings:
    return Settings.from_parameters(parameters(**given))


def refusal(**given: Any) -> str:
    with pytest.raises(RendezvousSettingsError) as caught:
        settings(**given)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RendezvousError)
    return str(caught.value)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_defaults_are_torchs_where_torch_has_them(caplog: pytest.LogCaptureFixture) -> None:
    found, torchs = settings(timeout=900), RendezvousTimeout()
    assert found.join_timeout_seconds == torchs.join.total_seconds()
    assert found.last_call_timeout_seconds == torchs.last_call.total_seconds()
    assert found.close_timeout_seconds == torchs.close.total_seconds()
    assert found.heartbeat_timeout_seconds == torchs.heartbeat.total_seconds()
    assert (found.keep_alive_interval_seconds, found.keep_alive_max_attempt) == (5.0, 3)
    assert (found.read_timeout_seconds, found.is_host, found.store_type) == (60.0, None, None)
    assert (found.outage_timeout_seconds, found.closed_grace_seconds) == (600.0, 60.0)
    assert found.restart_on_node_loss is True
    assert (found.rank_order, found.rank_hint, found.topology) == ("stable", None, "")
    assert found.password is None
    assert (found.backend, found.endpoint, found.run_id) == ("sqlite", "/tmp/job.db", "job")
    assert (found.min_nodes, found.max_nodes, found.local_addr) == (1, 4, None)
    assert warnings(caplog) == []


def test_without_options_the_fields_have_the_same_defaults() -> None:
    bare = Settings(
        backend="sqlite", endpoint="/tmp/job.db", run_id="job", min_nodes=1, max_nodes=4
    )
    assert settings() == bare


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", ["20.25", 20.25, " 20.25 "])
def test_durations_are_text_or_numbers(name: str, value: object) -> None:
    assert getattr(settings(**{name: value}), f"{name}_seconds") == 20.25


@pytest.mark.parametrize("name", DURATIONS)
def test_whole_seconds_and_none(name: str) -> None:
    assert getattr(settings(**{name: 20}), f"{name}_seconds") == 20.0
    assert settings(**{name: None}) == settings()


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize(
    "value",
    [
        *(0, "0", "0.0", "-1", -0.5, "nan", math.nan, "inf", math.inf, "-inf"),
        *("soon", "5s", "1m", "", "1,5", True, False, [], b"5"),
        *(10**400, DURATION_SECONDS_MAX * 1.01, "1e9", "0.0001"),
    ],
    ids=lambda value: str(value)[:8],
)
def test_a_duration_that_cannot_work_is_refused_by_name(name: str, value: object) -> None:
    text = refusal(**{name: value})
    assert text.startswith(f"{name}=")
    assert str(value)[:20] in text
    assert "give" in text
    assert "seconds" in text


@pytest.mark.parametrize("value", ["3", 3, 3.0, "3.0"])
def test_attempts_are_whole(value: object) -> None:
    found = settings(keep_alive_max_attempt=value, keep_alive_interval="0.5")
    assert found.keep_alive_max_attempt == 3
    assert isinstance(found.keep_alive_max_attempt, int)
    assert found.liveness_window_seconds == 1.5


@pytest.mark.parametrize(
    "value", [0, "-1", "2.5", "many", KEEP_ALIVE_ATTEMPTS_MAX + 1, True, "inf"]
)
def test_attempts_that_cannot_work(value: object) -> None:
    text = refusal(keep_alive_max_attempt=value)
    assert text.startswith("keep_alive_max_attempt=")
    assert "whole number from 1" in text


@pytest.mark.parametrize(
    "nodes", [(0, 4), (-1, 4), (5, 4), (1, NODES_MAX + 1), (1.5, 4), ("1", 4), (True, 4), (1, None)]
)
def test_numbers_of_nodes_that_cannot_work(nodes: tuple[Any, Any]) -> None:
    text = refusal(nodes=nodes)
    assert "--nnodes" in text
    assert "_nodes=" in text


def test_the_most_nodes() -> None:
    assert settings(nodes=(NODES_MAX, NODES_MAX)).max_nodes == NODES_MAX


@pytest.mark.parametrize(
    "run_id", ["", " ", "\n\t", "a\0b", "x" * (RUN_ID_BYTES_MAX + 1), "é" * 200, "\udc80", None, 7]
)
def test_run_ids_that_cannot_work(run_id: object) -> None:
    text = refusal(run_id=run_id)
    assert text.startswith("run_id=")
    assert "--rdzv-id" in text
    assert len(text) < 300


@pytest.mark.parametrize("run_id", ["x" * RUN_ID_BYTES_MAX, "é/../'\"%s {}", "none", " a "])
def test_run_ids_that_work(run_id: str) -> None:
    assert settings(run_id=run_id).run_id == run_id


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, True) for value in ("true", "YES", "1", 1, True, "on", "t")),
        *((value, False) for value in ("false", "no", "0", 0, False, "Off", "f")),
    ],
)
def test_truth(value: object, expected: bool) -> None:
    assert settings(restart_on_node_loss=value).restart_on_node_loss is expected
    assert settings(is_host=value).is_host is expected


@pytest.mark.parametrize("value", ["maybe", "", 2, 1.5, [], "truefalse"])
@pytest.mark.parametrize(
    "name", ["restart_on_node_loss", "is_host", "create_tables", "allow_network_filesystem"]
)
def test_what_is_neither_true_nor_false(name: str, value: object) -> None:
    assert refusal(**{name: value}).endswith("cannot work: give true or false.")


def test_labels() -> None:
    found = settings(rank_order="Topology", rank_hint="7", topology=" rack-3 ")
    assert (found.rank_order, found.rank_hint, found.topology) == ("topology", 7, "rack-3")
    assert "stable or natural or topology" in refusal(rank_order="random")
    assert refusal(rank_hint="-1").startswith("rank_hint='-1'")
    assert refusal(rank_hint=NODES_MAX).startswith("rank_hint=")
    assert refusal(topology="x" * 2000).startswith("topology=")


def test_the_store_type_follows_the_backend() -> None:
    assert settings(backend="tcpstore").store_type == "tcp"
    assert settings(backend="filestore", store_type="FILE").store_type == "file"
    assert settings(backend="thirdparty", store_type="tcp").store_type == "tcp"
    assert "--rdzv-backend=filestore" in refusal(backend="tcpstore", store_type="file")
    assert "tcp or file" in refusal(backend="tcpstore", store_type="hash")


def test_names_in_the_backend() -> None:
    found = settings(key_prefix="team/a:", table_prefix="team_", schema="jobs")
    assert (found.key_prefix, found.table_prefix, found.schema) == ("team/a:", "team_", "jobs")
    for prefix in ("a b", "a{b}", "", "x" * 200, 7):
        assert refusal(key_prefix=prefix).startswith("key_prefix=")
    for prefix in ("a-b", "a'; --", "7a", "", "x" * 33):
        assert refusal(table_prefix=prefix).startswith("table_prefix=")
    assert refusal(schema="a.b").startswith("schema=")


@pytest.mark.parametrize(("given", "expected"), [(" node7 ", "node7"), ("", None), ("  ", None)])
def test_local_addr(given: str, expected: str | None) -> None:
    assert settings(local_addr=given).local_addr == expected


def test_local_addr_that_cannot_work() -> None:
    assert refusal(local_addr="x" * 300).startswith("--local-addr=")
    assert refusal(local_addr=7).startswith("--local-addr=")


# Together


def test_the_liveness_window_is_shorter_than_the_outage_timeout() -> None:
    text = refusal(keep_alive_interval="10", keep_alive_max_attempt="3", outage_timeout="30")
    for said in ("keep_alive_interval=10", "keep_alive_max_attempt=3", "outage_timeout=30"):
        assert said in text
    settings(keep_alive_interval="10", keep_alive_max_attempt="3", outage_timeout="30.1")


def test_doubtful_combinations_work_and_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    settings(last_call_timeout="60", join_timeout="60")
    settings(keep_alive_max_attempt="1")
    settings(rank_order="topology")
    first, second, third = warnings(caplog)
    assert "last_call_timeout=60" in first
    assert "join_timeout=60" in first
    assert "keep_alive_max_attempt=1" in second
    assert "topology=LABEL" in third


def test_a_last_call_that_cannot_happen_is_no_doubt(caplog: pytest.LogCaptureFixture) -> None:
    settings(nodes=(4, 4), join_timeout="10")
    assert warnings(caplog) == []


# Unknown names


def test_an_unknown_option_is_warned_of_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings(join_timout="5", zzz="hunter22")
    first, second = warnings(caplog)
    assert "join_timout" in first
    assert "Did you mean join_timeout?" in first
    assert "zzz" in second
    assert "Did you mean" not in second
    assert "hunter22" not in caplog.text


def test_torchruns_timeout_is_nobodys_choice(caplog: pytest.LogCaptureFixture) -> None:
    assert settings(timeout=900) == settings()
    assert warnings(caplog) == []


def test_a_backends_own_options_are_known(caplog: pytest.LogCaptureFixture) -> None:
    params = parameters(sentinel_master="a", sentinel_mastr="b")
    Settings.from_parameters(params, frozenset({"sentinel_master"}))
    Settings.from_parameters(params)
    (only,) = warnings(caplog)
    assert "sentinel_mastr " in only
    assert "Did you mean sentinel_master?" in only


def test_each_parameters_object_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    params = parameters(join_timout="5", keep_alive_max_attempt="1")
    for _ in range(2):
        Settings.from_parameters(params)
    assert len(warnings(caplog)) == 2
    settings(join_timout="5")
    assert len(warnings(caplog)) == 3


@pytest.mark.parametrize("name", ["password", "passwd", "redis_password", "auth_token", "secret"])
def test_a_secret_among_the_options_is_not_shown(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = settings(**{name: "hunter22"})
    assert "password_file=PATH" in caplog.text
    assert "hunter22" not in caplog.text + repr(found)


def test_every_option_has_a_field() -> None:
    fields = set(Settings.__dataclass_fields__)
    for name in OPTIONS - {"password_file"}:
        assert name in fields or f"{name}_seconds" in fields, name


# Endpoint and secrets


def test_an_endpoint_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_ENDPOINT", " redis://u:hunter22@h/0\n")
    assert settings(endpoint="env:JOB_ENDPOINT").endpoint == "redis://u:hunter22@h/0"
    assert resolve_endpoint(" /tmp/a ") == "/tmp/a"
    assert resolve_endpoint("") == resolve_endpoint(None) == ""


@pytest.mark.parametrize("blank", [None, "", "  "])
def test_an_environment_variable_without_a_value(
    blank: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JOB_ENDPOINT", raising=False)
    if blank is not None:
        monkeypatch.setenv("JOB_ENDPOINT", blank)
    text = refusal(endpoint="env:JOB_ENDPOINT")
    assert "environment variable JOB_ENDPOINT" in text
    assert ("not set" if blank is None else "blank") in text


@pytest.mark.parametrize("endpoint", ["env:", "env:a b", "env:7", "env:$X"])
def test_what_is_no_environment_variable(endpoint: str) -> None:
    assert "env:NAME" in refusal(endpoint=endpoint)


def test_an_endpoint_that_is_too_long_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "redis://u:hunter22" + "x" * ENDPOINT_CHARACTERS_MAX
    assert "hunter22" not in refusal(endpoint=secret)
    monkeypatch.setenv("JOB_ENDPOINT", secret)
    text = refusal(endpoint="env:JOB_ENDPOINT")
    assert "hunter22" not in text
    assert "JOB_ENDPOINT" in text


def test_a_password_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"hunter 22", b"hunter 22\n", b"hunter 22\r\n"):
        (tmp_path / "password").write_bytes(content)
        assert settings(password_file=str(tmp_path / "password")).password == "hunter 22"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings(password_file="~/password").password == "hunter 22"


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"hunter22\xff", b"hunter22" * PASSWORD_BYTES_MAX], ids=len
)
def test_a_file_without_a_password(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    with pytest.raises(RendezvousSettingsError) as caught:
        settings(password_file=str(file))
    # A long path is shown in part.
    assert str(file)[:60] in str(caught.value)
    assert "hunter22" not in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert "UnicodeDecodeError" not in shown.replace("(UnicodeDecodeError)", "")


def test_a_password_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = refusal(password_file=str(tmp_path / "missing"))
    assert "password_file=" in missing
    assert "missing" in missing
    assert "No such file" in missing
    assert "no regular file" in refusal(password_file=str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal(password_file=str(tmp_path / "pipe"))
    assert refusal(password_file="a\0b").startswith("password_file=")
    assert refusal(password_file=7.5).startswith("password_file=")


def test_no_secret_in_repr_str_or_masked_text(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter22\n")
    found = settings(
        endpoint="redis://user:swordf%40sh@host:6379/0?password=opensesame",
        password_file=str(tmp_path / "password"),
    )
    driver_message = "cannot log in to host with swordf@sh, swordf%40sh, opensesame or hunter22"
    for text in (repr(found), str(found), found.masked_endpoint, found.mask(driver_message)):
        for secret in ("hunter22", "swordf", "opensesame"):
            assert secret not in text
        assert "host" in text
    assert "run_id='job'" in repr(found)


def test_a_refused_value_that_holds_a_secret_is_masked() -> None:
    text = refusal(join_timeout="redis://user:" + "hunter22" * 20 + "@host/0")
    assert "hunter22" not in text
    assert "redis://user:***@host/0" in text


def test_a_long_value_is_cut() -> None:
    assert len(refusal(join_timeout="9" * 10_000)) < 300
