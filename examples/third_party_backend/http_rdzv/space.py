"""What the server keeps, and how it outlives the server.

Rules:

* The state is plain JSON; values are base64 text. It changes only by *changes*, plain JSON too.
  To make the same changes in the same order gives the same state: a change draws no random number
  and looks at no clock, but brings with it what it needs.
* A change is appended to the journal, then made. Nothing is answered, to writers or readers,
  before all that the answer rests on has been forced to the disk.
* A line that is cut off at the journal's end was never answered, and is dropped. Damage before
  that keeps the server from starting.
* When the journal cannot be written the process ends at once: its memory is ahead of the disk.
* The mutations of one client come in *slots*: each slot makes one at a time, numbered upwards. A
  number that comes again gets the first answer again; a lower one is late, and refused. So nothing
  is counted twice, and one answer for each slot is all that has to be remembered.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Change = dict[str, Any]

WRITES_REMEMBERED = 256
"""So many writes of a document later, its server still knows whether a write was made."""
FORGET_AFTER_SECONDS = 7 * 24 * 3600.0
"""A run that nobody has written to for so long is left out when the journal is rewritten."""
JOURNAL_BYTES_MIN = 64 << 20
"""A journal is rewritten when it has this size and twice that of the last rewriting."""


class Late(Exception):
    """A mutation that came after a later one of its slot."""


@dataclass(slots=True)
class Run:
    """All that is kept of one run id."""

    state: str | None = None
    etag: str = ""
    writes: list[str] = field(default_factory=list)
    """The ids of the last writes of the document, the oldest first."""
    values: dict[str, str] = field(default_factory=dict)
    queues: dict[str, list[str]] = field(default_factory=dict)
    slots: dict[str, list[Any]] = field(default_factory=dict)
    """The number of the last mutation, and its answer."""
    written_at: float = 0.0
    """In seconds since the epoch, by the server's clock."""


class Space:
    """The runs of one server. Every method may be called from any thread."""

    def __init__(self, path: Path | None = None) -> None:
        """``path`` is the journal's; None keeps everything in memory only."""
        self._runs: dict[str, Run] = {}
        self._changed = threading.Condition()
        self._journal = None if path is None else Journal(path)
        if self._journal is not None:
            for change in self._journal.changes():
                self._make(change)
            self._rewrite(self._journal)

    def document(self, run_id: str, write: str = "") -> tuple[str | None, str, bool]:
        """The document or None, its ETag, and whether the write was made, as far as is known."""
        with self._changed:
            run = self._runs.get(run_id, Run())
            answer = run.state, run.etag, write in run.writes
            position = self._position
        self._force(position)
        return answer

    def put(self, run_id: str, state: str, expected: str | None, write: str) -> bool:
        """Write the document where its ETag is ``expected``, None standing for no document."""
        with self._changed:
            run = self._runs.get(run_id, Run())
            fits = expected == (None if run.state is None else run.etag)
            if fits:
                self._commit({"do": "put", "run": run_id, "state": state, "write": write})
            position = self._position
        self._force(position)
        return fits

    def mutate(self, run_id: str, do: str, given: Any, slot: str, number: int) -> Any:
        """The answer of a mutation of the store, made now or when it came first.

        Raises ``Late`` for one that must not be made any more.
        """
        with self._changed:
            last = self._runs.get(run_id, Run()).slots.get(slot, [0, None])
            if number < last[0]:
                raise Late
            if number > last[0]:
                change = {"do": do, "run": run_id, "given": given, "slot": slot, "number": number}
                self._commit(change)
                last = self._runs[run_id].slots[slot]
            position = self._position
        self._force(position)
        return last[1]

    def look(
        self,
        run_id: str,
        question: Callable[[Run], Any],
        is_enough: Callable[[Any], bool],
        wait_seconds: float,
    ) -> Any:
        """The answer to a question about a run, as soon as it is enough or time is up."""
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            while True:
                answer = question(self._runs.get(run_id, Run()))
                left = deadline - time.monotonic()
                if is_enough(answer) or left <= 0:
                    break
                self._changed.wait(left)
            position = self._position
        self._force(position)
        return answer

    @property
    def _position(self) -> int:
        return 0 if self._journal is None else self._journal.position

    def _force(self, position: int) -> None:
        if self._journal is not None:
            self._journal.force(position)

    def _commit(self, change: Change) -> None:
        change["at"] = time.time()
        if self._journal is not None:
            self._journal.append(change)
        self._make(change)
        self._changed.notify_all()
        if self._journal is not None and self._journal.is_long:
            self._rewrite(self._journal)

    def _make(self, change: Change) -> None:
        if change["do"] == "load":
            self._runs[change["run"]] = Run(**change["is"])
            return
        run = self._runs.setdefault(change["run"], Run())
        run.written_at = change["at"]
        if change["do"] == "put":
            run.state, run.etag = change["state"], change["write"]
            run.writes = [*run.writes, run.etag][-WRITES_REMEMBERED:]
            return
        try:
            answer = {"answer": MUTATIONS[change["do"]](run, **change["given"])}
        except (TypeError, ValueError, AttributeError) as error:
            answer = {"error": str(error)}
        run.slots[change["slot"]] = [change["number"], answer]

    def _rewrite(self, journal: Journal) -> None:
        oldest = time.time() - FORGET_AFTER_SECONDS
        self._runs = {key: run for key, run in self._runs.items() if run.written_at > oldest}
        journal.rewrite(
            {"do": "load", "run": key, "is": asdict(run)} for key, run in self._runs.items()
        )


class Journal:
    """Changes in a file, one a line with a checksum.

    Raises ``OSError`` where it cannot be opened or another server has it, ``ValueError`` where it
    is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.position = 0
        """How many changes have been appended by this process."""
        self._path = path
        self._lock_file = path.with_name(f"{path.name}.lock").open("wb")
        fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file = path.open("ab")
        self._forced = 0
        self._forcing = threading.Lock()
        self._long_bytes = JOURNAL_BYTES_MIN

    @property
    def is_long(self) -> bool:
        """Whether it is time to rewrite it."""
        return self._file.tell() > self._long_bytes

    def changes(self) -> Iterator[Change]:
        """What is in the file."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                change = _change_in(line)
                if change is None and not file.read(1):
                    return
                if change is None:
                    raise ValueError(f"{self._path} is damaged in line {number}")
                yield change

    def append(self, change: Change) -> None:
        """Hand a change to the operating system. Calls must not overlap."""
        try:
            self._file.write(_line_of(change))
            self._file.flush()
        except OSError as error:
            _give_up(self._path, error)
        self.position += 1

    def force(self, position: int) -> None:
        """Return when the first ``position`` changes are on the disk. Threads that come together
        share one call to the disk."""
        with self._forcing:
            if self._forced < position:
                reached = self.position
                try:
                    os.fsync(self._file.fileno())
                except OSError as error:
                    _give_up(self._path, error)
                self._forced = reached

    def rewrite(self, changes: Iterable[Change]) -> None:
        """Put these changes into the place of all others, at once and for good."""
        new = self._path.with_name(f"{self._path.name}.new")
        with self._forcing:
            try:
                file = new.open("wb")
                file.writelines(_line_of(change) for change in changes)
                file.flush()
                os.fsync(file.fileno())
                new.replace(self._path)
                _force_folder(self._path.parent)
            except OSError as error:
                _give_up(self._path, error)
            self._file.close()
            self._file, self._forced = file, self.position
            self._long_bytes = max(JOURNAL_BYTES_MIN, 2 * file.tell())


def _line_of(change: Change) -> bytes:
    text = json.dumps(change, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _change_in(line: bytes) -> Change | None:
    """The change, or None where the line is cut off or damaged."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    change: Change = json.loads(text)
    return change


def _force_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give_up(path: Path, error: OSError) -> None:
    print(f"The journal {path} cannot be written: {error}", file=sys.stderr, flush=True)
    os._exit(1)


# The mutations of a store, by their names in requests.


def _set_many(run: Run, pairs: list[list[str]]) -> None:
    run.values.update(dict(pairs))


def _add(run: Run, key: str, amount: int) -> int:
    digits = base64.b64decode(run.values.get(key, "MA=="))
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise ValueError(f"cannot add to {key!r}: its value is no decimal number")
    total = int(digits) + amount
    if not -(2**63) <= total < 2**63:
        raise ValueError(f"cannot add {amount} to {key!r}: the sum leaves 64 bits")
    run.values[key] = base64.b64encode(str(total).encode()).decode()
    return total


def _compare_set(run: Run, key: str, expected: str, desired: str) -> str | None:
    if run.values.get(key, "") == expected:
        run.values[key] = desired
    return run.values.get(key)


def _append(run: Run, key: str, value: str, bytes_max: int) -> None:
    whole = base64.b64decode(run.values.get(key, "")) + base64.b64decode(value)
    if len(whole) > bytes_max:
        raise ValueError(f"value for {key!r} would have {len(whole)} bytes, over {bytes_max}")
    run.values[key] = base64.b64encode(whole).decode()


def _delete(run: Run, key: str) -> bool:
    return run.values.pop(key, None) is not None


def _queue_push(run: Run, key: str, value: str) -> None:
    run.queues.setdefault(key, []).append(value)


def _queue_pop(run: Run, key: str) -> str | None:
    queue = run.queues.get(key)
    if not queue:
        return None
    value = queue.pop(0)
    if not queue:
        del run.queues[key]
    return value


MUTATIONS: dict[str, Callable[..., Any]] = {
    "set_many": _set_many,
    "add": _add,
    "compare_set": _compare_set,
    "append": _append,
    "delete": _delete,
    "queue_push": _queue_push,
    "queue_pop": _queue_pop,
}
