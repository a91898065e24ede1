"""What can go wrong with a file: where it is, who holds it, what becomes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rdzv.backends.sql import SqlBackend, SqlOptions
from rdzv.backends.sql.files import filesystem_type, is_network
from rdzv.conformance.store_kit import Background
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousSettingsError,
    RendezvousStateError,
)
from rdzv.ports import Entry, Question
from rdzv.stores.sql import SqlStore

from .sqlite_space import SqliteTarget, raw, rows

SWARM = Path(__file__).with_name("sqlite_swarm.py")
IMPATIENT = SqlOptions(read_timeout_seconds=0.3)


@pytest.fixture
def space(tmp_path: Path) -> Iterator[SqliteTarget]:
    space = SqliteTarget(tmp_path / "rdzv.db")
    yield space
    space.close()


# -------------------------------------------------------------------------------- where it may be


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("", "--rdzv-endpoint="),
        (":memory:", "one process only"),
        ("sqlite://", "one process only"),
        ("sqlite:///:memory:", "one process only"),
        ("file:x.db", "file: names"),
        ("localhost:29400", "host and port"),
        ("10.0.0.1:29400", "host and port"),
        ("[::1]:29400", "host and port"),
        ("oracle://user:hunter22@host/db", "not part of this release"),
        ("postgresql+psycopg2://user:hunter22@host/db", "psycopg 3"),
        ("postgresql://user:hunter22@host:port/db", "no URL"),
        ("mysql+aiomysql://user:hunter22@host/db", "not known to work"),
        ("sqlite+aiosqlite:////tmp/x.db", "not part of this release"),
        ("redis://host", "not part of this release"),
        ("://", "no URL"),
        ("sqlite://tmp/x.db", "four slashes"),
        ("sqlite:////tmp/x.db?mode=ro", "nothing may follow"),
        ("/tmp/x\0y", "NUL"),
        ("/nowhere/at/all/x.db", "create it"),
        ("/tmp", "is a directory"),
        ("/dev/null", "not a regular file"),
    ],
)
def test_an_endpoint_that_cannot_work_says_what_would(endpoint: str, says: str) -> None:
    with pytest.raises(RendezvousSettingsError) as caught:
        SqlBackend(endpoint, "job")
    assert says in str(caught.value)
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}", "sqlite+pysqlite:///{}"])
def test_a_path_and_its_urls_are_the_same_file(space: SqliteTarget, form: str) -> None:
    found = space.connect().set_state(b"x")[:2]
    backend = SqlBackend(form.format(space.path), "job")
    assert backend.get_state() == found
    assert backend.endpoint == str(space.path)
    backend.close()


@pytest.mark.parametrize(
    "name", ["a b.db", "100%.db", "what?.db", "x#y.db", "\u00fc.db", "no ending"]
)
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    backend = SqlBackend(str(tmp_path / name), "job")
    backend.set_state(b"x")
    assert (tmp_path / name).is_file()
    backend.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_relative_path_stays_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    for endpoint in ("job.db", "sqlite:///job.db"):
        monkeypatch.chdir(tmp_path / "one")
        backend = SqlBackend(endpoint, "job")
        monkeypatch.chdir(tmp_path / "two")
        backend.open()
        assert (tmp_path / "one" / "job.db").is_file()
        assert not list((tmp_path / "two").iterdir())
        backend.close()


@pytest.mark.parametrize(
    "kind",
    ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "gpfs", "9p", "virtiofs", "ceph"],
)
def test_a_network_file_system_is_refused(space: SqliteTarget, kind: str) -> None:
    asked: list[Path] = []

    def answer(directory: Path) -> str:
        asked.append(directory)
        return kind

    with pytest.raises(RendezvousSettingsError, match="allow_network_filesystem=true") as caught:
        SqlBackend(str(space.path), "job", filesystem_type=answer)
    assert kind in str(caught.value)
    assert asked == [space.path.parent]
    with pytest.raises(RendezvousSettingsError, match=kind):
        SqlStore(str(space.path), "job", filesystem_type=answer)
    assert not space.path.exists()


def test_the_option_lifts_the_check_and_does_without_shared_memory(space: SqliteTarget) -> None:
    allowed = SqlOptions(allow_network_filesystem=True)
    backend = SqlBackend(str(space.path), "job", allowed, filesystem_type=lambda _: "nfs4")
    found = backend.set_state(b"x")[:2]
    assert not Path(f"{space.path}-shm").exists()
    waiting = Background(lambda: backend.wait_for_change(found[1], 60.0)).still_blocked()
    other = SqlBackend(str(space.path), "job", allowed, filesystem_type=lambda _: "nfs4")
    assert other.set_state(b"y", found[1])[:2] == waiting.result()
    assert not Path(f"{space.path}-shm").exists()
    backend.close()
    other.close()


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuse.fuse-overlayfs", ""]
)
def test_a_local_file_system_is_taken(space: SqliteTarget, kind: str) -> None:
    backend = SqlBackend(str(space.path), "job", filesystem_type=lambda _: kind)
    backend.set_state(b"x")
    assert Path(f"{space.path}-shm").exists()
    backend.close()


@pytest.mark.skipif(sys.platform != "linux", reason="mountinfo is Linux's")
def test_the_kernel_is_asked_for_the_type() -> None:
    assert filesystem_type(Path("/proc")) == "proc"
    assert filesystem_type(Path("/proc/self/task")) == "proc"
    assert filesystem_type(Path("/")) not in ("", "proc")
    assert not is_network(filesystem_type(Path("/proc")))


def test_a_directory_without_rights_is_refused() -> None:
    """In a process of another user, since root may write anywhere."""
    folder = Path(tempfile.mkdtemp(prefix="rdzv-rights-"))
    try:
        folder.chmod(0o555)
        done = subprocess.run(
            [sys.executable, str(SWARM), "without-rights", str(folder / "rdzv.db")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"RendezvousSettingsError: the directory {folder} cannot be")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is where not even root makes files")
def test_a_place_where_no_file_can_be_made() -> None:
    with pytest.raises(RendezvousError, match=r"/proc/\d+.*(permissions|can write)"):
        SqlBackend("/proc/self/rdzv.db", "job").open()


# ------------------------------------------------------------------------------------ what it is


def test_a_file_that_is_no_database_is_left_alone(space: SqliteTarget) -> None:
    space.path.write_text("a letter to my aunt\n" * 100)
    backend = space.connect()
    with pytest.raises(RendezvousSettingsError, match="not an SQLite database"):
        backend.open()
    # To a job that runs it is an outage: whoever put it there may take it away again.
    with pytest.raises(RendezvousConnectionError, match="not an SQLite database"):
        backend.get_state()
    with pytest.raises(RendezvousSettingsError, match="not an SQLite database"):
        SqlStore(str(space.path), "job")
    assert space.path.read_text().startswith("a letter")
    space.path.unlink()
    assert backend.set_state(b"x")[2]


def test_an_empty_file_is_a_database(space: SqliteTarget) -> None:
    space.path.touch()
    assert space.connect().set_state(b"x")[2]


def test_a_database_of_somebody_elses_is_shared(space: SqliteTarget) -> None:
    with raw(space.path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
        connection.execute("INSERT INTO theirs VALUES (1)")
        assert space.connect().set_state(b"x")[2]
        assert connection.execute("SELECT * FROM theirs").fetchall() == [(1,)]


def test_tables_of_a_newer_release_are_refused(space: SqliteTarget) -> None:
    space.connect().set_state(b"x")
    with raw(space.path) as connection:
        connection.execute("UPDATE rdzv_schema SET version = version + 1")
    backend = space.connect()
    for call in (backend.open, backend.get_state, lambda: backend.set_state(b"y")):
        with pytest.raises(RendezvousStateError, match="same release"):
            call()
    assert rows(space.path, "states")[0][-1] == b"x"


@pytest.mark.parametrize("stored", ["'text'", "5", "1.5"])
def test_a_document_of_another_kind_is_an_error_and_stays(space: SqliteTarget, stored: str) -> None:
    backend = space.connect()
    _, token, _ = backend.set_state(b"x")
    with raw(space.path) as connection:
        connection.execute(f"UPDATE rdzv_states SET state = {stored}, version = 2")
    for call in (
        backend.get_state,
        lambda: backend.set_state(b"y"),
        lambda: backend.set_state(b"y", token),
        lambda: backend.wait_for_change(token, 1.0),
    ):
        with pytest.raises(RendezvousStateError, match="has not written"):
            call()
    with raw(space.path) as connection:
        [(kind,)] = connection.execute("SELECT typeof(state) FROM rdzv_states").fetchall()
    assert kind != "blob"


def test_a_roster_entry_of_another_kind_is_an_error(space: SqliteTarget) -> None:
    backend = space.connect()
    backend.announce(Entry("node", b"x"), 60.0, Question())
    for change in ("data = 5", "data = x'00', node_id = 'text'", "node_id = x'ff'"):
        with raw(space.path) as connection:
            connection.execute(f"UPDATE rdzv_roster SET {change}")
        with pytest.raises(RendezvousStateError, match="has not written"):
            backend.entries()


def test_a_damaged_file_is_an_error_until_it_is_gone(space: SqliteTarget) -> None:
    backend = space.connect()
    _, token, _ = backend.set_state(b"x" * 100_000)
    backend.close()
    size = space.path.stat().st_size
    with space.path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    for call in (backend.get_state, lambda: backend.set_state(b"y", token), backend.entries):
        with pytest.raises((RendezvousStateError, RendezvousConnectionError), match=r"rdzv\.db"):
            call()
    space.lose_file = True
    space.wipe()
    assert backend.set_state(b"z")[2]


# --------------------------------------------------------------------------- what becomes of it


def heals(call: Callable[[], Any]) -> Any:
    """What the call returns after it has said once that contact was lost."""
    with pytest.raises(RendezvousConnectionError):
        call()
    return call()


def remove_all(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


def remove_main_file_only(path: Path) -> None:
    path.unlink()


def replace_by_an_empty_one(path: Path) -> None:
    new = path.with_suffix(".new")
    new.touch()
    new.replace(path)


def drop_one_table(path: Path) -> None:
    with raw(path) as connection:
        connection.execute("DROP TABLE rdzv_states")
        connection.execute("DELETE FROM rdzv_roster")


def drop_tables(path: Path) -> None:
    with raw(path) as connection:
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'rdzv_%'"
        ).fetchall():
            connection.execute(f"DROP TABLE {name}")


@pytest.mark.parametrize(
    "lose",
    [remove_all, remove_main_file_only, replace_by_an_empty_one, drop_one_table, drop_tables],
)
def test_every_object_learns_of_a_loss_and_goes_on(
    space: SqliteTarget, lose: Callable[[Path], None]
) -> None:
    first, second = space.connect(), space.connect()
    _, token, _ = first.set_state(b"old")
    second.announce(Entry("second", b""), 60.0, Question())
    waiting = Background(lambda: second.wait_for_change(token, 60.0)).still_blocked()
    lose(space.path)
    with pytest.raises(RendezvousConnectionError, match="anew"):
        waiting.result()
    assert heals(first.get_state) is None
    found = first.set_state(b"new")[:2]
    # It has said so already, to the one that waited.
    assert not second.beat("second", 60.0, Question()).present
    second.announce(Entry("second", b""), 60.0, Question())
    assert second.get_state() == first.get_state() == found
    assert [row.entry.node_id for row in first.entries()] == ["second"]
    third = space.connect()
    for number in range(50):
        _, token = third.get_state() or (b"", None)
        assert first.set_state(b"%d" % number, token)[2]
    assert second.get_state() == third.get_state() == first.get_state()
    with raw(space.path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_new_file_has_nothing_of_the_old_one(space: SqliteTarget) -> None:
    """Somebody holds the old file open; its index in shared memory must not serve the new one."""
    space.connect().set_state(b"old" * 50_000)
    with raw(space.path) as holder:
        holder.execute("SELECT * FROM rdzv_states").fetchall()
        space.close()
        space.path.unlink()
        newcomer = space.connect("new")
        token = None
        for number in range(50):
            answer = newcomer.set_state(b"%d" % number * 1000, token)
            assert answer is not None
            assert answer[2]
            token = answer[1]
        newcomer.close()
        # The old holder's world is its own.
        assert len(holder.execute("SELECT * FROM rdzv_states").fetchall()) == 1
        assert newcomer.get_state() == (b"49" * 1000, token)
    with raw(space.path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_loss_while_closed_is_told_too(space: SqliteTarget) -> None:
    backend = space.connect()
    backend.set_state(b"x")
    backend.close()
    remove_all(space.path)
    assert heals(backend.get_state) is None


def test_a_folder_that_comes_back_is_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    backend = SqlBackend(str(folder / "rdzv.db"), "job")
    backend.set_state(b"x")
    shutil.rmtree(folder)
    for _ in range(2):
        with pytest.raises(RendezvousConnectionError, match="shared"):
            backend.get_state()
    folder.mkdir()
    assert backend.get_state() is None
    assert backend.set_state(b"y")[2]
    backend.close()


def test_a_locked_file_is_an_error_in_time(space: SqliteTarget) -> None:
    backend = space.connect(options=IMPATIENT)
    found = backend.set_state(b"x")[:2]
    with raw(space.path) as holder:
        holder.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match=r"locked.*read_timeout"):
            backend.set_state(b"y", found[1])
        assert 0.25 <= time.monotonic() - started < 5
        started = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match=r"locked.*read_timeout"):
            backend.announce(Entry("node", b""), 60.0, Question())
        assert 0.25 <= time.monotonic() - started < 5
        # Reading needs no lock.
        assert backend.get_state() == found
        holder.execute("COMMIT")
    assert backend.set_state(b"y", found[1])[2]


def test_a_lock_on_a_new_file_is_waited_for_in_time(space: SqliteTarget) -> None:
    with raw(space.path) as holder:
        holder.execute("CREATE TABLE theirs (x)")
        holder.execute("BEGIN EXCLUSIVE")
        started = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match="locked"):
            space.connect(options=IMPATIENT).open()
        assert time.monotonic() - started < 5
        opening = Background(space.connect().open).still_blocked()
        holder.execute("COMMIT")
        opening.result()


def test_a_full_disk_is_named_and_heals(space: SqliteTarget) -> None:
    backend = space.connect()
    _, token, _ = backend.set_state(b"x")
    engine = backend._database._pool.engine
    limited = [True]

    def limit(connection: Any) -> None:
        pages = 40 if limited[0] else 1_000_000
        connection.connection.driver_connection.execute(f"PRAGMA max_page_count={pages}")

    sa.event.listen(engine, "begin", limit)
    with pytest.raises(RendezvousConnectionError, match=r"is full.*space"):
        backend.set_state(b"y" * 1_000_000, token)
    assert backend.get_state() == (b"x", token)
    limited[0] = False
    assert backend.set_state(b"y" * 1_000_000, token)[2]


# --------------------------------------------------------------------------------- lost answers


def lose_answers(backend: Any, applied: bool) -> None:
    """From now on a commit is made, or not, and then its answer is lost; once."""
    dialect = backend._database._pool.engine.dialect
    commit = dialect.do_commit

    def do_commit(connection: Any) -> None:
        dialect.do_commit = commit
        if applied:
            commit(connection)
        raise connection.driver_connection.OperationalError("disk I/O error")

    dialect.do_commit = do_commit


def test_a_write_whose_answer_was_lost_is_recognised(space: SqliteTarget) -> None:
    backend = space.connect()
    _, token, _ = backend.set_state(b"x")
    lose_answers(backend, applied=True)
    state, new, success = backend.set_state(b"y", token)
    assert (state, success) == (b"y", True)
    assert backend.get_state() == (b"y", new)


def test_a_write_that_was_not_made_is_not_repeated(space: SqliteTarget) -> None:
    backend = space.connect()
    _, token, _ = backend.set_state(b"x")
    lose_answers(backend, applied=False)
    with pytest.raises(RendezvousConnectionError, match="disk I/O error"):
        backend.set_state(b"y", token)
    assert backend.get_state() == (b"x", token)


def test_a_file_system_error_names_the_file(
    space: SqliteTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = space.connect()

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        with pytest.raises(RendezvousConnectionError, match=r"rdzv.db.*Too many open files"):
            backend.get_state()
    assert backend.get_state() is None
