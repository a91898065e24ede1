"""The clauses about faults, on servers that are really paused, killed and cut off.

What torch's TCPStore does not hold is declared, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.suites import Suite, deviates
from rdzv.conformance.target import Target

from .network_targets import HttpTarget, TcpTarget, http_server, tcp_server
from .remote_sqlite import RemoteTarget, remote_server

pytestmark = pytest.mark.full


def started(make: Callable[[Path], ProcessServer]) -> Any:
    """A fixture: a server for all clauses."""

    @pytest.fixture(scope="module")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
        server = make(tmp_path_factory.mktemp("server"))
        yield server
        server.close()

    return server


http = started(http_server)
tcp = started(tcp_server)
remote = started(remote_server)


class _Http:
    @pytest.fixture
    def target(self, http: ProcessServer, request: pytest.FixtureRequest) -> Iterator[Target]:
        target = HttpTarget(http, f"{request.node.name}-")
        yield target
        target.close()


class _Remote:
    @pytest.fixture
    def target(self, remote: ProcessServer, request: pytest.FixtureRequest) -> Iterator[Target]:
        target = RemoteTarget(remote, f"{request.node.name}-")
        yield target
        target.close()


class TestRemoteBackend(_Remote, Suite, books=("backend",), groups=("faults",)):
    pass


class TestRemoteRoster(_Remote, Suite, books=("roster",), groups=("faults",)):
    pass


class TestRemoteWatch(_Remote, Suite, books=("watch",), groups=("faults",)):
    pass


class TestHttpBackend(_Http, Suite, books=("backend",), groups=("faults",)):
    pass


class TestHttpStore(_Http, Suite, books=("store",), groups=("faults",)):
    pass


HANGS = "what is sent is waited for without a timeout"
DEAD = "its clients never connect again"
SILENT = "its server does not answer a set or an append, so the client cannot know of it"
OVERTAKEN = "its server does not answer a set or a push, so what follows may come first"
TRIED, NOT_TRIED = True, False
"""Not tried is what hangs, what fails now and then, or what takes long to show
that it does not recover."""
TCP_STORE: dict[str, tuple[str, bool]] = {
    **dict.fromkeys(
        (
            "store_calls_in_a_black_hole_fail_in_time",
            "store_calls_to_a_paused_server_fail_in_time",
            "calls_that_were_given_up_count_once_at_most",
        ),
        (HANGS, NOT_TRIED),
    ),
    **dict.fromkeys(
        (
            "store_calls_whose_answers_are_all_lost_fail_in_time",
            "store_calls_to_a_killed_server_fail_in_time",
            "an_append_whose_answer_is_lost_happens_once",
            "a_set_that_is_repeated_undoes_nothing",
        ),
        (SILENT, TRIED),
    ),
    **dict.fromkeys(
        (
            "histories_of_a_value_under_lost_answers_are_linearizable",
            "histories_of_a_queue_under_lost_answers_are_linearizable",
        ),
        (OVERTAKEN, NOT_TRIED),
    ),
    **dict.fromkeys(
        (
            "store_calls_over_a_cut_network_fail_in_time",
            "a_store_connection_cut_while_idle_is_replaced",
            "an_add_whose_answer_is_lost_counts_once",
            "a_compare_set_whose_answer_is_lost_tells_the_truth",
            "a_deletion_whose_answer_is_lost_tells_the_truth",
            "those_who_wait_over_a_cut_network_are_released",
            "those_whose_release_is_lost_are_released_again",
            "those_who_wait_while_the_server_restarts_are_released",
            "those_who_wait_while_the_server_loses_all_are_released",
            "a_server_that_comes_back_empty_serves_on",
            "closing_a_store_after_faults_leaves_no_connection",
        ),
        (DEAD, NOT_TRIED),
    ),
}


def all_of(deviations: dict[str, tuple[str, bool]]) -> Callable[[type[Suite]], Any]:
    def declare(suite: type[Suite]) -> Any:
        for name, (reason, run) in deviations.items():
            deviates(name, reason, run=run)(suite)
        return suite

    return declare


@all_of(TCP_STORE)
class TestTcpStore(Suite, books=("store",), groups=("faults",)):
    @pytest.fixture
    def target(self, tcp: ProcessServer, request: pytest.FixtureRequest) -> Iterator[Target]:
        target = TcpTarget(tcp, request.node.name)
        yield target
        target.close()
