"""What is particular to a FileStore: the file, which may be stale, foreign, locked or gone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from rdzv import registry
from rdzv.backends.c10d_places import FilePlace
from rdzv.backends.options import REQUEST_SECONDS_MAX
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousSettingsError,
    RendezvousStateError,
)

from .operations import run_apart, until
from .test_c10d import LONG_SECONDS, READ_SECONDS, parameters


def opened_file(opened: list[Any], path: Path, **config: str) -> Any:
    backend, store = registry.open_backend(parameters("filestore", str(path), **config))
    opened += [backend, store]
    return backend


def test_a_stale_file_is_begun_anew(opened: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "store"
    first = opened_file(opened, path)
    first.set_state(b"1")
    link = first._links._link
    first.close()
    until(lambda: not link.alive)  # torch's FileStore writes to the file when it is given up
    assert opened_file(opened, path).get_state()[0] == b"1"
    long_ago = time.time() - 24 * 3600
    os.utime(path, (long_ago, long_ago))
    assert opened_file(opened, path).get_state() is None


def test_a_removed_file_is_an_error_at_once(opened: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "store"
    backend = opened_file(opened, path)
    backend.set_state(b"1")
    path.unlink()
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(RendezvousStateError, match="was removed"):
            backend.get_state()
        assert time.monotonic() - started < REQUEST_SECONDS_MAX
    assert not path.exists()


IN_A_FILE_THAT_IS_REPLACED = """
import os, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousConnectionError
from rdzv import registry
from rdzv.ports import Entry, Question

def opened():
    times = {"close_timeout": "1", "read_timeout": "3"}
    parameters = RendezvousParameters("filestore", sys.argv[1], "job", 1, 1, **times)
    return registry.open_backend(parameters)[0]

first = opened()
first.announce(Entry("first", b"xyz", "round"), 60.0, Question())
first.set_state(b"abcde")
first.beat("first", 60.0, Question())
open(sys.argv[1] + ".new", "w").close()
os.replace(sys.argv[1] + ".new", sys.argv[1])
second = opened()
second.announce(Entry("second", b"", "round"), 60.0, Question())
for _ in range(30):
    second.beat("second", 60.0, Question())
try:
    first.get_state()
except RendezvousConnectionError:
    pass
assert first.get_state() is None
assert second.set_state(b"1")[2]
assert first.get_state()[0] == b"1"
first.close()
second.close()
"""
"""Of odd sizes, so that one file has no record where the other one ends."""


def test_a_file_that_was_replaced_holds_up_nobody(tmp_path: Path) -> None:
    """Torch's FileStore reads on where it was, which may be within a record of the new file, and
    never ends; nor does then whoever waits for the lock that it holds."""
    run_apart(IN_A_FILE_THAT_IS_REPLACED, str(tmp_path / "store"))


@pytest.mark.parametrize("age_seconds", [0, 24 * 3600])
def test_a_file_of_something_else_is_left_as_it_is(
    opened: list[Any], tmp_path: Path, age_seconds: float
) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    written_at = time.time() - age_seconds
    os.utime(path, (written_at, written_at))
    with pytest.raises(RendezvousSettingsError, match="left as it is"):
        opened_file(opened, path)
    assert path.read_text() == "import torch\n"


WITH_HALF_A_RECORD = """
import struct, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from rdzv import registry
from rdzv.ports import Entry, Question

def opened():
    times = {"close_timeout": "1", "read_timeout": "5"}
    parameters = RendezvousParameters("filestore", sys.argv[1], "job", 1, 1, **times)
    return registry.open_backend(parameters)

key, value = b"/rdzv/a key", b"a value"
record = struct.pack("=I", len(key)) + key + struct.pack("=I", len(value)) + value
backend, store = opened()
token = backend.set_state(b"0")[1]
backend.announce(Entry("node", b"", "round"), 60.0, Question())
for cut in range(1, len(record)):
    with open(sys.argv[1], "ab") as file:
        file.write(record[:cut])
    if cut % 4 == 0:
        assert backend.get_state()[0] == str(cut - 1).encode()
    elif cut % 4 == 1:
        store.set("key", str(cut))
        assert store.get("key") == str(cut).encode()
    elif cut % 4 == 2:
        assert backend.beat("node", 60.0, Question()).present
    else:
        other, its_store = opened()
        assert other.get_state()[0] == str(cut - 1).encode()
        its_store.append("text", str(cut))
        other.close()
    state, token, mine = backend.set_state(str(cut).encode(), token)
    assert mine
assert store.get("key") == b"25"
backend.close()
"""


def test_half_a_record_is_cut_off(tmp_path: Path) -> None:
    """A process that is killed within a write leaves it; torch reads on after it for ever."""
    run_apart(WITH_HALF_A_RECORD, str(tmp_path / "store"))


ON_A_FULL_DISK = """
import os, resource, signal, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousConnectionError
from rdzv import registry

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
times = {"close_timeout": "1", "read_timeout": "5"}
parameters = RendezvousParameters("filestore", sys.argv[1], "job", 1, 1, **times)
backend, store = registry.open_backend(parameters)
store.set("key", "before")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for room in range(3, 60, 7):
    size = os.stat(sys.argv[1]).st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
    try:
        store.set("key", 100 * "x")
    except RuntimeError:
        pass
    else:
        raise AssertionError("there is no room for it")
    assert os.stat(sys.argv[1]).st_size > size
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert store.get("key") == b"before"
backend.close()
"""


def test_a_disk_that_was_full_loses_what_did_not_fit(tmp_path: Path) -> None:
    run_apart(ON_A_FULL_DISK, str(tmp_path / "store"))


def test_a_lock_that_somebody_keeps_is_not_waited_for_for_ever(
    opened: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "store"
    with (
        FilePlace(str(path), LONG_SECONDS).exclusive(),
        pytest.raises(RendezvousConnectionError, match=r"store\.lock"),
    ):
        opened_file(opened, path, read_timeout=str(READ_SECONDS))
    assert opened_file(opened, path).get_state() is None


FORKED_IN_A_TURN = """
import os, signal, sys
from rdzv.backends.c10d_places import FilePlace

place = FilePlace(sys.argv[1], 60.0)
place.open(1.0)
with place.turn(shared=sys.argv[2] == "shared"):
    child = os.fork()
    if not child:
        signal.pause()
try:
    place.open(1.0)
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("turn", ["alone", "shared"])
def test_a_child_that_is_forked_in_a_turn_keeps_no_lock(tmp_path: Path, turn: str) -> None:
    """It has open what its parent had open, for as long as it lives."""
    run_apart(FORKED_IN_A_TURN, str(tmp_path / "store"), turn)


def test_a_file_without_a_folder(opened: list[Any], tmp_path: Path) -> None:
    with pytest.raises(RendezvousSettingsError, match="folder that exists"):
        opened_file(opened, tmp_path / "nowhere" / "store")
