"""PostgreSQL: what a crash takes with it of what did not wait for the disk."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg
import sqlalchemy as sa

from rdzv.backends.sql import SqlBackend
from rdzv.ports import Entry, Question

from .operations import TTL_SECONDS, reach, until


def test_what_a_crash_takes_with_it_is_gone_to_who_has_said_it(
    postgresql: Any, opened: Any
) -> None:
    """An announcement does not wait for the disk. One that did not reach it leaves the node's last
    one, by which others would wait for the node while it waits for them."""
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    set_server(postgresql, "ALTER SYSTEM SET wal_writer_delay = '10s'")
    try:
        for _ in range(5):
            backend.announce(Entry("node", b"0"), TTL_SECONDS, Question())
            found = reach(backend.get_state)
            backend.set_state(b"", found and found[1])  # which waits for the disk
            for number in (b"1", b"2", b"3"):
                backend.announce(Entry("node", number), TTL_SECONDS, Question())
            crash(postgresql)
            present = reach(lambda: backend.beat("node", TTL_SECONDS, Question())).present
            [listed] = reach(backend.entries)
            assert present == (listed.entry.data == b"3")
            if not present:
                break
        assert not present, "no crash has taken anything with it"
        backend.announce(Entry("node", b"3"), TTL_SECONDS, Question())
        assert backend.beat("node", TTL_SECONDS, Question()).present
    finally:
        set_server(postgresql, "ALTER SYSTEM RESET wal_writer_delay")


def connected(server: Any) -> psycopg.Connection[Any]:
    url = sa.make_url(server.endpoint()).set(drivername="postgresql")
    return psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)


def set_server(server: Any, statement: str) -> None:
    with connected(server) as connection:
        connection.execute(statement.encode())
        connection.execute("SELECT pg_reload_conf()")


def crash(server: Any) -> None:
    """Kill one of the server's processes, for which it starts all of them anew."""
    with contextlib.closing(connected(server)) as killer:
        with contextlib.closing(connected(server)) as killed:
            process = killed.info.backend_pid
            with contextlib.suppress(psycopg.Error):
                killer.execute(f"COPY (SELECT 1) TO PROGRAM 'kill -9 {process}'".encode())
        until(lambda: has_ended(killer))


def has_ended(connection: psycopg.Connection[Any]) -> bool:
    try:
        connection.execute("SELECT 1")
    except psycopg.Error:
        return True
    return False
