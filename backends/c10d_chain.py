"""The document of a run in a torch store, whose one atomic step is ``compare_set`` of one value.

Theory. Every version has a token, ``life:number:nonce``. A version is written by *creating* the
key that hangs on the token of its predecessor, which one writer alone can do: so the token, not
the old document, is what a write compares, and a document travels once. ``head`` names the last
version. It follows by a compare-and-set of its own, which is the moment from which a version is
read; a version whose writer died before it is put there by the next writer, who finds the key
taken. A key whose document is superseded keeps one letter: it must never be free again.

A *life* is what one server, or one file, has been through without losing its data. It is drawn
when the first node comes, and stands in every token: no token outlives a loss.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from rdzv.errors import RendezvousStateError

ABSENT = b"?"
"""Asking ``compare_set`` to put this in the place of this tells what is there, and waits never."""
NO_HEAD = b"-"
SUPERSEDED = b"x"
BELLS_KEPT = 256
ATTEMPTS_MAX = 64

_HEAD = re.compile(rb"(\S{1,200}) ([0-9a-f]{32}:([0-9]{1,18}):[0-9a-f]{16}) ([0-9]{0,20})")


class DataLost(Exception):
    """The store holds another life than a moment ago."""


@dataclass(frozen=True, slots=True)
class Head:
    """What ``head`` says."""

    raw: bytes
    previous: str = ""
    token: str | None = None
    number: int = 0
    stamp_ms: int | None = None


class Chain:
    """The document of one run; used by one thread at a time.

    ``stamp_ms`` is the store's own clock, where it has one: it dates what is written.
    """

    def __init__(
        self, store: Callable[[], Any], base: str, life: bytes, stamp_ms: Callable[[], int | None]
    ) -> None:
        self._store = store
        self._base = base
        self._life = life
        self._stamp_ms = stamp_ms
        self._known: tuple[str, bytes] | None = None

    def head(self, raw: bytes) -> Head:
        """What the value of ``head`` says, put right where a writer has died."""
        head = self._parsed(raw)
        while head.token is None:
            first = self._ask(self._next_key(None))
            if first == ABSENT:
                return head
            head = self._follow(head, first)
        if not head.token.startswith(self._life.decode()):
            raise DataLost
        return head

    def document(self, head: Head) -> tuple[bytes, str] | None:
        """The document of ``head``, or of a later one; None where there is none."""
        for _ in range(ATTEMPTS_MAX):
            if head.token is None:
                return None
            if self._known is not None and self._known[0] == head.token:
                return self._known[1], head.token
            value = self._ask(self._next_key(None if head.previous == "-" else head.previous))
            token, state = self._unpacked(value)
            if token == head.token:
                self._known = (head.token, state)
                return state, head.token
            if value == ABSENT:
                raise DataLost
            head = self.head(self._ask(self._base + "head"))
        self._foreign(b"a head that leads nowhere")

    def swap(self, head: Head, state: bytes, token: str | None, nonce: str) -> Head | None:
        """Write the next version, if ``token`` is that of ``head``. Returns the new head, or None
        where another write came first.

        ``nonce`` is 16 hexadecimal digits that tell this write from all others.
        """
        if token != head.token:
            return None
        new_token = f"{self._life.decode()}:{head.number + 1}:{nonce}"
        stamp_ms = self._stamp_ms()
        stamp = "" if stamp_ms is None else str(stamp_ms)
        value = f"D{new_token} {stamp}\n".encode() + state
        found = self._compare_set(self._next_key(token), b"", value)
        if found != value:
            self._follow(head, found)
            return None
        new = self._parsed(f"{token or '-'} {new_token} {stamp}".encode())
        self._known = (new_token, state)
        self._move_head(head, new)
        self._ring()
        if head.token is not None:
            previous = None if head.previous == "-" else head.previous
            self._store().set(self._next_key(previous), SUPERSEDED)
        return new

    def was_written(self, token: str | None, nonce: str) -> str | None:
        """The token of the version that follows ``token``, if ``nonce`` is its writer's."""
        value = self._ask(self._next_key(token))
        found, state = self._unpacked(value)
        if found is None or not found.endswith(f":{nonce}"):
            return None
        head = self.head(self._ask(self._base + "head"))
        if head.token == token:
            self._follow(head, value)
        self._known = (found, state)
        return found

    def _ring(self) -> None:
        """Wake whoever waits."""
        bell = ring(self._store(), self._base)
        if bell > BELLS_KEPT:
            self._store().delete_key(f"{self._base}bell/{bell - BELLS_KEPT}")

    def _follow(self, head: Head, value: bytes) -> Head:
        """Put the version that follows ``head`` there, unless it is superseded by now."""
        token, _ = self._unpacked(value)
        if token is not None:
            stamp = value.split(b"\n", 1)[0].split(b" ", 1)[1].decode()
            new = self._parsed(f"{head.token or '-'} {token} {stamp}".encode())
            self._move_head(head, new)
        elif value == ABSENT:
            raise DataLost
        return self._parsed(self._ask(self._base + "head"))

    def _move_head(self, old: Head, new: Head) -> None:
        found = self._compare_set(self._base + "head", old.raw, new.raw)
        if found == new.raw:
            return
        now = self._parsed(found)
        ours = now.token is not None and now.token.startswith(self._life.decode())
        if not ours or now.number < new.number:
            raise DataLost

    def _next_key(self, token: str | None) -> str:
        return f"{self._base}next/{token or 'first'}"

    def _ask(self, key: str) -> bytes:
        return self._compare_set(key, ABSENT, ABSENT)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        value: bytes = self._store().compare_set(key, expected, desired)
        return value

    def _parsed(self, raw: bytes) -> Head:
        if raw == NO_HEAD:
            return Head(raw)
        if raw == ABSENT:
            raise DataLost
        match = _HEAD.fullmatch(raw)
        if match is None:
            self._foreign(raw)
        previous, token, number, stamp = match.groups()
        return Head(
            raw, previous.decode(), token.decode(), int(number), int(stamp) if stamp else None
        )

    def _unpacked(self, value: bytes) -> tuple[str | None, bytes]:
        if value in (ABSENT, SUPERSEDED):
            return None, b""
        line, newline, state = value.partition(b"\n")
        match = _HEAD.fullmatch(b"- " + line[1:])
        if not newline or line[:1] != b"D" or match is None:
            self._foreign(value)
        return match[2].decode(), state

    def _foreign(self, value: bytes) -> NoReturn:
        raise RendezvousStateError(
            f"The store holds bytes below {self._base!r} that rdzv has not written there "
            f"({value[:24]!r}). They are left as they are: use another run id or another store."
        )


def ring(store: Any, base: str) -> int:
    """Wake all who wait for a change; the number of the bell that was rung.

    First it rings, then it is counted: who dies in between leaves a bell that has rung and that
    those whom it wakes count, not one that never rings.
    """
    bell = int(store.get(base + "bell")) + 1
    store.set(f"{base}bell/{bell}", b"1")
    count_bell(store, base, bell)
    return bell


def count_bell(store: Any, base: str, bell: int) -> None:
    """Let the next bell be the one after this, unless that has been done."""
    store.compare_set(base + "bell", str(bell - 1).encode(), str(bell).encode())


def new_nonce() -> str:
    """What tells a write from all others."""
    return uuid.uuid4().hex[:16]


def laid_out(store: Any, base: str) -> bytes:
    """Make the keys that every request reads, where they are missing; the life of the store."""
    life = base + "life"
    first = {"head": NO_HEAD, "tally": b"0", "log": b",", "bell": b"0", "seats": b" "}
    if not store.check([life, *(base + name for name in first)]):
        for name, value in first.items():
            store.compare_set(base + name, b"", value)
        store.compare_set(life, b"", (new_nonce() + new_nonce()).encode())
    found: bytes = store.get(life)
    return found
