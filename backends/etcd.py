"""The etcd v3 backend: a document beside its version, an entry for each node under its own lease.

Theory. Every operation on the records is one transaction. Below the run's prefix are:

* ``s``, the document behind its mark, and ``v``, the mark alone, written together. The mark names
  the write; it and the revision are the token. The revision orders; the mark makes a token unusable
  after its document was lost and made anew, and lets a writer whose answer was lost recognise its
  own write by reading again. ``v`` is what a pulse reads, for it has a constant size.
* ``n/<node>``, the entries, each under a lease of its node: a beat keeps it alive and writes
  nothing. Who arrived first was created first, as etcd counts. ``l/<label>/<node>`` is there for
  counting, under the same lease; ``g/<node>`` are tombstones.
* ``r``, written with every change of the roster: its revision is the roster's.

``r`` and ``s`` are neighbours, so one watch hears of both; one that hears of ``s`` alone stays
(:mod:`rdzv.backends.etcd_follow`). Who waits looks once its watch is there, so nothing is missed.
"""

from __future__ import annotations

import random
import re
import time
import uuid
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.backends.etcd_age import MARK, document_of, token_of
from rdzv.backends.etcd_client import EtcdConnections, Refused, in_time, is_passing
from rdzv.backends.etcd_follow import Follower
from rdzv.backends.etcd_operations import digest, end_of, range_of, raw, whole_seconds
from rdzv.backends.etcd_options import EtcdOptions
from rdzv.backends.etcd_rows import Row, entry_of, revision_of, row_of, text_of, value_of
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import (
    Closable,
    Entry,
    FirstLook,
    Listed,
    Located,
    Pulse,
    Question,
    Roster,
    Token,
    Watch,
)

WAIT_SLICE_SECONDS_MAX = 5.0
"""A longer wait looks in between, in case that a watch has died without a word."""
TRIES_MAX = 8
PAUSE_SECONDS = 0.1
FRESH_SHARE = 1 / 16
"""Of the time to live: a lease that was kept alive so shortly ago need not be once more. Nodes that
come together announce themselves and confirm their round within that time."""
_TOKEN = re.compile(rf"(?P<revision>[0-9]{{1,18}}):(?P<mark>{MARK.pattern.decode()})")


class EtcdRendezvousBackend(RendezvousBackend, Roster, Watch, FirstLook, Located, Closable):
    """The records of one run on an etcd server or cluster.

    Nothing is opened before the first call. ``client`` may be an object of etcd3's family, which
    is used then, and not closed. Raises ``RendezvousSettingsError`` for an endpoint that cannot
    work.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        options: EtcdOptions | None = None,
        *,
        name: str = "etcd-v3",
        client: Any = None,
    ) -> None:
        self._name = name
        self._etcd = EtcdConnections(endpoint, run_id, options or EtcdOptions(), client)
        base = self._etcd.base
        self._state, self._version, self._roster = base + b"s", base + b"v", base + b"r"
        self._nodes, self._labels, self._gone = base + b"n/", base + b"l/", base + b"g/"
        self._follower = Follower(self._etcd)
        self._rows: dict[str, Row] = {}
        """What this object has announced, or beaten for."""
        self._granted: dict[int, int] = {}
        """The times to live that leases got, by those that were asked for: etcd has a least."""
        self._fresh: dict[str, tuple[int, int, float]] = {}
        """Of this object's nodes the lease, and for how long it lives from which moment on."""
        self._asked = [
            self._etcd.get(self._version),
            self._etcd.get(self._roster),
            self._etcd.get(self._nodes, end_of(self._nodes), count_only=True),
        ]

    @property
    def name(self) -> str:
        return self._name

    @property
    def endpoint(self) -> str:
        return self._etcd.endpoint

    @property
    def connections(self) -> EtcdConnections:
        """For a store of the same run beside it."""
        return self._etcd

    def route(self) -> tuple[str, int] | None:
        return self._etcd.route()

    def close(self) -> None:
        self._etcd.close()

    @in_time
    def open(self) -> None:
        """Connect, and try all that is needed later; for ``read_timeout`` where a server is only
        slow or has no leader yet. Raises ``RendezvousConnectionError``."""
        etcd = self._etcd
        ends_at = time.monotonic() + etcd.options.read_timeout_seconds
        read = etcd.get(etcd.base, end_of(etcd.base), count_only=True)
        while True:
            try:
                etcd.write((), [etcd.put(etcd.base + b"t", b""), read], reads=True)
                return
            except RendezvousConnectionError as error:
                if not is_passing(error.__cause__) or time.monotonic() >= ends_at:
                    raise
            time.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.0))

    # -------------------------------------------------------------------------- the document

    @in_time
    def get_state(self) -> tuple[bytes, Token] | None:
        return self._document(range_of(self._etcd.read(self._etcd.get(self._state)), 0))

    @in_time
    def look_and_watch(self) -> tuple[bytes, Token] | None:
        news = self._follower.look()
        if news is None or (news.token is not None and news.found is None):
            return self.get_state()
        return news.found

    @in_time
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        compare = self._unchanged(token)
        if compare is None:  # a token that was never ours: the write has lost
            found = self.get_state()
            return None if found is None else (*found, False)
        return self._write_state(compare, bytes(state))

    def _write_state(
        self, compare: list[Any], state: bytes, *, again: bool = False
    ) -> tuple[bytes, Token, bool] | None:
        ages = self._follower.ages
        lease, left_ms = ages.clock(self._etcd)
        mark = f"{uuid.uuid4().hex} {lease} {left_ms}".encode()
        try:
            answer = self._put_state(compare, mark, state, lease)
        except RendezvousConnectionError as error:
            ages.forget_clock()
            if isinstance(error.__cause__, Refused) and not again:
                # Nothing was written: the clock's lease is gone, with all other data.
                return self._write_state(compare, state, again=True)
            # The answer may have been lost, not the write: whose is the one that holds?
            found = self.get_state()
            if found is None or not str(found[1]).endswith(f":{mark.decode()}"):
                raise
            return state, found[1], True
        if not answer.succeeded:
            found = self._document(range_of(answer, 0))
            return None if found is None else (*found, False)
        written = f"{answer.header.revision}:{mark.decode()}"
        ages.heard(written)
        return state, written, True

    def _put_state(self, compare: list[Any], mark: bytes, state: bytes, lease: int) -> Any:
        etcd = self._etcd
        return etcd.write(
            compare,
            [
                etcd.put(self._state, mark + b"\n" + state),
                etcd.put(self._version, mark),
                # Refused where the clock's lease is gone, and the mark would tell a wrong age.
                etcd.put(etcd.base + b"c", b"", lease),
            ],
            [etcd.get(self._state)],
        )

    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: Any = None
    ) -> tuple[bytes, Token] | None:
        deadline, closings = time.monotonic() + timeout_seconds, self._etcd.closings
        unchanged = self._unchanged(token)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return self._compare(unchanged, revision)[1]
            seconds = min(left, WAIT_SLICE_SECONDS_MAX)
            try:
                if unchanged is None or revision is not None:
                    is_over, found = self._hear(unchanged, revision, seconds, closings)
                else:
                    is_over, found = self._follow(token, unchanged, seconds, closings)
                    if not is_over and time.monotonic() >= deadline:
                        return None
                if is_over:
                    return found
            except RendezvousConnectionError:
                # Else look: whoever cannot be asked says so then.
                self._etcd.check_open(closings)
                is_over, found, _ = self._compare(unchanged, revision)
                if is_over:
                    return found
                time.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.0))
            self._etcd.check_open(closings)

    def _compare(
        self, unchanged: list[Any] | None, revision: Any
    ) -> tuple[bool, tuple[bytes, Token] | None, int]:
        """Whether there is anything new, the document if it is, and the revision that was seen."""
        etcd = self._etcd
        roster, state = etcd.get(self._roster), etcd.get(self._state)
        if unchanged is None:
            looked = etcd.read(roster, state)
        else:
            looked = etcd.transact(unchanged, [roster], [roster, state], reads=True)
        looked_at = int(looked.header.revision)
        if unchanged is None or not looked.succeeded:
            return True, self._document(range_of(looked, 1)), looked_at
        kvs = range_of(looked, 0).kvs
        is_new = revision is not None and (revision_of(kvs[0]) if kvs else "") != revision
        return is_new, None, looked_at

    def _follow(
        self, token: Token | None, unchanged: list[Any], seconds: float, closings: int
    ) -> tuple[bool, tuple[bytes, Token] | None]:
        """The same as soon as the document has changed, or after a while."""
        at = 0 if token is None else int(token.partition(":")[0])
        news = self._follower.wait(token, at, seconds, closings)
        if news is not None and (news.token is None or news.found is not None):
            return True, news.found
        self._etcd.check_open(closings)
        is_over, found, _ = self._compare(unchanged, None)
        if news is not None and not is_over:  # what was heard has been undone: not in a circle
            time.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.0))
        return is_over, found

    def _hear(
        self, unchanged: list[Any] | None, revision: Any, seconds: float, closings: int
    ) -> tuple[bool, tuple[bytes, Token] | None]:
        """The same where the roster counts too: watch, then look, then wait."""
        first, end = self._state, None
        if revision is not None:
            first, end = self._roster, self._state + b"\0"
        watch = self._etcd.watch(first, end, 0, seconds, puts=False, closings=closings)
        looked_at = 0
        for event in watch:
            if not isinstance(event, int) and event.kv.mod_revision <= looked_at:
                continue  # a member that lags behind tells of what the look has seen already
            is_told = not isinstance(event, int) and event.type == event.PUT
            if is_told and event.kv.key == self._state:
                found = document_of(self._etcd, event.kv)
                self._follower.ages.heard(found[1])
                return True, found
            if is_told and revision_of(event.kv) != revision:
                return True, None
            is_over, told, looked_at = self._compare(unchanged, revision)
            if is_over:
                return True, told
        return False, None

    def _unchanged(self, token: Token | None) -> list[Any] | None:
        """The condition that the document is the token's; None for a token that was never ours."""
        if token is None:
            return [self._etcd.is_absent(self._state)]
        found = _TOKEN.fullmatch(token) if isinstance(token, str) else None
        if found is None:
            return None
        revision = int(found["revision"])
        if revision == 0:
            return None
        return [
            self._etcd.is_at(self._state, revision),
            self._etcd.holds(self._version, found["mark"].encode()),
        ]

    def _document(self, found: Any) -> tuple[bytes, Token] | None:
        return document_of(self._etcd, found.kvs[0]) if found.kvs else None

    # ---------------------------------------------------------------------------- the roster

    @in_time
    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        seconds, runs = whole_seconds(ttl_seconds), bool(entry.round_label)
        node, row = entry.node_id, self._rows.get(entry.node_id)
        for _ in range(TRIES_MAX):
            is_kept = row is not None and self._keep(node, row, seconds)
            if row is not None and is_kept and row.entry == entry:
                answer = self._look(node, question)
                now = row_of(self._etcd, node, range_of(answer, 0))
                if now == row:
                    return self._pulse(answer, question, True, runs)
                row = now
                continue
            lease = row.lease if row is not None and is_kept else self._grant(node, seconds)
            has_changed = row is None or row.entry != entry
            answer = self._put(entry, row, lease, question, has_changed)
            if answer.succeeded:
                self._remember(node, Row(entry, answer.header.revision, lease))
                return self._pulse(answer, question, True, runs)
            row = row_of(self._etcd, node, range_of(answer, 0))
        raise self._restless(node)

    @in_time
    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        seconds, row = whole_seconds(ttl_seconds), self._rows.get(node_id)
        is_kept = row is not None and self._keep(node_id, row, seconds)
        for _ in range(TRIES_MAX):
            answer = self._look(node_id, question)
            now = row_of(self._etcd, node_id, range_of(answer, 0))
            if now is None or (is_kept and now == row):
                self._remember(node_id, now)
                present = now is not None
                return self._pulse(answer, question, present, True, thoroughly=True)
            # Somebody else has announced it, or it is to live for another time.
            is_other, row = now != row, now
            is_kept = is_other and self._keep(node_id, now, seconds)
            if not is_kept:
                lease = self._grant(node_id, seconds)
                moved = self._put(row.entry, row, lease, question, has_changed=False)
                if moved.succeeded:
                    row, is_kept = Row(row.entry, moved.header.revision, lease), True
        raise self._restless(node_id)

    @in_time
    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        etcd, row = self._etcd, self._rows.get(node_id)
        lease, _ = etcd.grant(whole_seconds(ttl_seconds))
        key = self._nodes + raw(node_id)
        for _ in range(TRIES_MAX):
            removed = [] if row is None else [etcd.delete(key), *self._label(row.entry)]
            answer = etcd.write(
                [etcd.is_at(key, 0 if row is None else row.revision)],
                [
                    *removed,
                    etcd.put(self._gone + raw(node_id), b"", lease),
                    etcd.put(self._roster, uuid.uuid4().bytes),
                ],
                [etcd.get(key)],
            )
            if answer.succeeded:
                self._remember(node_id, None)
                return
            row = row_of(self._etcd, node_id, range_of(answer, 0))
        raise self._restless(node_id)

    @in_time
    def entries(self) -> list[Listed]:
        etcd = self._etcd
        kind = etcd.messages.RangeRequest
        order = {"sort_order": kind.ASCEND, "sort_target": kind.CREATE}
        answer = etcd.read(
            etcd.get(self._nodes, end_of(self._nodes), **order),
            etcd.get(self._gone, end_of(self._gone), keys_only=True, **order),
        )
        live = [
            Listed(entry_of(etcd, text_of(etcd, kv.key[len(self._nodes) :]), kv.value))
            for kv in range_of(answer, 0).kvs
        ]
        gone = [text_of(etcd, kv.key[len(self._gone) :]) for kv in range_of(answer, 1).kvs]
        return [*live, *(Listed(Entry(node, b""), withdrawn=True) for node in gone)]

    def _put(
        self, entry: Entry, row: Row | None, lease: int, question: Question, has_changed: bool
    ) -> Any:
        """Write an entry in the place of what is known to be there, under a lease."""
        etcd, node = self._etcd, raw(entry.node_id)
        key, label = self._nodes + node, self._label_key(entry)
        operations = [etcd.put(key, value_of(entry), lease)]
        if label is not None:
            operations.append(etcd.put(label, b"", lease))
        if row is not None and self._label_key(row.entry) != label:
            operations += self._label(row.entry)
        if has_changed:
            operations.append(etcd.put(self._roster, uuid.uuid4().bytes))
        if has_changed and row is None:  # whoever leaves a tombstone takes the entry away with it
            operations.append(etcd.delete(self._gone + node))
        return etcd.write(
            [etcd.is_at(key, 0 if row is None else row.revision)],
            [*operations, *self._questions(question)],
            [etcd.get(key)],
        )

    def _keep(self, node_id: str, row: Row, seconds: int) -> bool:
        """Keep a lease alive, if it was not just now. Whether it is there, as far as is known, and
        lives for so long."""
        now = time.monotonic()
        lease, known_seconds, kept_at = self._fresh.get(node_id, (0, 0, now))
        is_same = (lease, known_seconds) == (row.lease, seconds)
        if is_same and now - kept_at < seconds * FRESH_SHARE:
            return True
        lives = self._etcd.keep_alive(row.lease)
        is_kept = lives > 0 and lives == self._granted.get(seconds, seconds)
        if is_kept:
            self._fresh[node_id] = row.lease, seconds, now
        return is_kept

    def _grant(self, node_id: str, seconds: int) -> int:
        now = time.monotonic()
        lease, granted = self._etcd.grant(seconds)
        self._granted[seconds] = granted
        self._fresh[node_id] = lease, seconds, now
        return lease

    def _remember(self, node_id: str, row: Row | None) -> None:
        if row is None:
            self._rows.pop(node_id, None)
            self._fresh.pop(node_id, None)
        else:
            self._rows[node_id] = row

    def _look(self, node_id: str, question: Question) -> Any:
        self._etcd.refresh()
        key = self._nodes + raw(node_id)
        return self._etcd.read(self._etcd.get(key), *self._questions(question))

    def _questions(self, question: Question) -> list[Any]:
        """What a pulse is made of, the last of a transaction's answers."""
        etcd, asked = self._etcd, list(self._asked)
        if question.peer_id:
            asked.append(etcd.get(self._nodes + raw(question.peer_id), count_only=True))
        if question.round_label:
            label = self._labels + digest(question.round_label) + b"/"
            asked.append(etcd.get(label, end_of(label), count_only=True))
        return asked

    def _pulse(
        self,
        answer: Any,
        question: Question,
        present: bool,
        listens: bool,
        *,
        thoroughly: bool = False,
    ) -> Pulse:
        count = len(self._asked) + bool(question.peer_id) + bool(question.round_label)
        version, roster, live, *more = (range_of(answer, at) for at in range(-count, 0))
        token, age = None, None
        if listens:  # who waits, and does not run yet, hears of writes by its wait
            self._follower.listen()
        if version.kvs:
            token = token_of(version.kvs[0])
        if token is not None and token != question.ageless:
            age = self._follower.ages.age_seconds(self._etcd, version.kvs[0], thoroughly=thoroughly)
        return Pulse(
            token=token,
            live=live.count,
            revision=revision_of(roster.kvs[0]) if roster.kvs else "",
            present=present,
            peer_live=bool(question.peer_id) and more[0].count > 0,
            confirmed=more[-1].count if question.round_label else 0,
            state_age_seconds=age,
        )

    def _label_key(self, entry: Entry) -> bytes | None:
        if not entry.round_label:
            return None
        return self._labels + digest(entry.round_label) + b"/" + raw(entry.node_id)

    def _label(self, entry: Entry) -> list[Any]:
        """What removes an entry's label."""
        key = self._label_key(entry)
        return [] if key is None else [self._etcd.delete(key)]

    def _restless(self, node_id: str) -> RendezvousConnectionError:
        return RendezvousConnectionError(
            f"etcd at {self.endpoint}: the entry of {node_id} changes all the time. See whether "
            "two processes use one node id."
        )
