"""Broken rosters: who is here now."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

from kit.catalogue import a_moment, catalogue

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.ports import Entry, Listed, Pulse, Question

fault = catalogue("roster")

FOR_EVER_SECONDS = 1e9
SKEW_SECONDS = time.time() - time.monotonic()
"""Between this machine's two clocks, until somebody sets one."""


def rows_of(backend: MemoryBackend) -> Any:
    """The rows of the run by node, expired and withdrawn ones included."""
    return backend._run.rows


def client_clock_seconds(backend: MemoryBackend) -> float:
    """The space's time, and by how much this machine's clock has been set forward since."""
    return backend._space.clock() + time.time() - time.monotonic() - SKEW_SECONDS


class _Pulses(MemoryBackend):
    """Answers with another pulse."""

    def _pulse(self, present: bool, question: Question) -> Pulse:
        with self._space.changed:
            return self.falsified(super()._pulse(present, question), question)

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        raise NotImplementedError


# Expiry


@fault("an_entry_expires_unless_it_is_kept_alive", seen_in="Redis' SET, which takes a TTL away")
class NeverExpires(MemoryBackend):
    """An entry outlives its node for ever."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        return super().announce(entry, FOR_EVER_SECONDS, question)

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        return super().beat(node_id, FOR_EVER_SECONDS, question)


@fault(
    "the_clock_of_this_machine_expires_nobody",
    seen_in="time.time() + ttl compared by other machines; torch's own keep-alives",
)
class ExpiresByTheReadersClock(MemoryBackend):
    """Whether an entry has expired is told by the clock of whoever reads it."""

    def entries(self) -> list[Listed]:
        with self._space.changed:
            now, rows = client_clock_seconds(self), rows_of(self)
            return [one for one in super().entries() if rows[one.entry.node_id].expires_at > now]


@fault(
    "the_clock_of_this_machine_expires_nobody",
    seen_in="an 'expires_at' column that the client computes",
)
class ExpiresByTheWritersClock(MemoryBackend):
    """When an entry expires is computed by the clock of whoever writes it."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        ahead_seconds = client_clock_seconds(self) - self._space.clock()
        return super().announce(entry, ttl_seconds + ahead_seconds, question)


@fault("an_entry_expires_unless_it_is_kept_alive", seen_in="keep-alives that are upserts")
class BeatRevives(MemoryBackend):
    """A beat brings an entry back that had expired."""

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            row = rows_of(self).get(node_id)
            if row and not row.withdrawn:
                row.expires_at = self._space.clock() + ttl_seconds
            return super().beat(node_id, ttl_seconds, question)


@fault("a_pulse_is_exact", seen_in="keep-alives that are upserts")
class BeatAnnounces(MemoryBackend):
    """A beat of a node that has never announced makes an entry of it."""

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            if node_id not in rows_of(self):
                return self.announce(Entry(node_id, b""), ttl_seconds, question)
            return super().beat(node_id, ttl_seconds, question)


@fault("each_call_sets_how_long_an_entry_lives", seen_in="upserts that return early if unchanged")
class AnnouncingAgainExtendsNothing(MemoryBackend):
    """To announce what is there already does not let the entry live longer."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            row = self._live(entry.node_id)
            if row and row.entry == entry:
                return self._pulse(True, question)
            return super().announce(entry, ttl_seconds, question)


@fault("each_call_sets_how_long_an_entry_lives", seen_in="leases, whose TTL is that of their grant")
class BeatsWithTheFirstTtl(MemoryBackend):
    """A beat lets the entry live as long as it was first announced for, not as long as it says."""

    def __init__(self, space: MemorySpace, run_id: str) -> None:
        super().__init__(space, run_id)
        self._ttls_seconds: dict[str, float] = {}

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        self._ttls_seconds[entry.node_id] = ttl_seconds
        return super().announce(entry, ttl_seconds, question)

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        return super().beat(node_id, self._ttls_seconds.get(node_id, ttl_seconds), question)


# Leaving


@fault("a_withdrawn_node_leaves_a_tombstone", seen_in="leaving by DEL")
class LeavesNoTombstone(MemoryBackend):
    """Who withdraws vanishes, like one that has died."""

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        with self._space.changed:
            super().withdraw(node_id, ttl_seconds)
            del rows_of(self)[node_id]


@fault("a_withdrawn_node_leaves_a_tombstone", seen_in="leaving by an UPDATE that touches no row")
class LeavesNoTombstoneForTheUnknown(MemoryBackend):
    """Who withdraws without an entry leaves no tombstone."""

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        with self._space.changed:
            if node_id in rows_of(self):
                super().withdraw(node_id, ttl_seconds)


@fault("a_withdrawn_node_leaves_a_tombstone", seen_in="a set of those who left, without a TTL")
class TombstonesNeverExpire(MemoryBackend):
    """A tombstone stays for ever."""

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        super().withdraw(node_id, FOR_EVER_SECONDS)


@fault("a_withdrawn_node_leaves_a_tombstone", seen_in="a set of those who left, never taken from")
class TombstonesKeepOut(MemoryBackend):
    """Who has withdrawn cannot come back while its tombstone is there."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            row = rows_of(self).get(entry.node_id)
            if row and row.withdrawn and row.expires_at > self._space.clock():
                return self._pulse(True, question)
            return super().announce(entry, ttl_seconds, question)


@fault("a_withdrawn_node_leaves_a_tombstone", seen_in="keep-alives that are upserts")
class BeatLiftsTombstones(MemoryBackend):
    """A beat that was under way when its node withdrew brings the entry back."""

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            row = rows_of(self).get(node_id)
            if row:
                row.withdrawn = False
            return super().beat(node_id, ttl_seconds, question)


# Order


class _Reorders(MemoryBackend):
    """Has a way to send a node to the end of the order."""

    def to_the_end(self, node_id: str) -> None:
        row = rows_of(self).get(node_id)
        if row:
            row.arrival = self._space.next_number()


@fault("nodes_are_listed_in_the_order_of_arrival", seen_in="INSERT OR REPLACE, and ZADD without NX")
class AnnouncingReorders(_Reorders):
    """To announce again puts a node at the end of the order."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            self.to_the_end(entry.node_id)
            return super().announce(entry, ttl_seconds, question)


@fault("nodes_are_listed_in_the_order_of_arrival", seen_in="a sorted set scored by the last beat")
class BeatReorders(_Reorders):
    """A beat puts a node at the end of the order."""

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            self.to_the_end(node_id)
            return super().beat(node_id, ttl_seconds, question)


@fault("nodes_are_listed_in_the_order_of_arrival", seen_in="range reads, which are sorted by key")
class ListsByName(MemoryBackend):
    """Nodes are listed in the order of their ids."""

    def entries(self) -> list[Listed]:
        return sorted(super().entries(), key=lambda one: (one.withdrawn, one.entry.node_id))


@fault("nodes_are_listed_in_the_order_of_arrival", seen_in="upserts that keep created_at")
class KeepsThePlaceOfWhoLeft(MemoryBackend):
    """Who withdrew and comes back gets its old place in the order."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            places = self.__dict__.setdefault("_places", {})
            pulse = super().announce(entry, ttl_seconds, question)
            row = rows_of(self)[entry.node_id]
            row.arrival = places.setdefault(entry.node_id, row.arrival)
            return pulse


# Revision


@fault("the_revision_moves_with_changes_only", seen_in="ZooKeeper's version and SQL's xmin, by row")
class BeatMovesTheRevision(MemoryBackend):
    """A beat moves the revision, so that everybody lists everybody all the time."""

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            if self._live(node_id):
                self._run.revision = self._space.next_number()
            return super().beat(node_id, ttl_seconds, question)


@fault("the_revision_moves_with_changes_only", seen_in="triggers on INSERT and UPDATE alone")
class LeavingMovesNoRevision(MemoryBackend):
    """To withdraw does not move the revision."""

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        with self._space.changed:
            revision = self._run.revision
            super().withdraw(node_id, ttl_seconds)
            self._run.revision = revision


@fault("the_revision_moves_with_changes_only", seen_in="counting INSERTs only")
class ChangingMovesNoRevision(MemoryBackend):
    """To announce a change of an entry does not move the revision."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            row = self._live(entry.node_id)
            if row:
                row.entry = entry
            return super().announce(entry, ttl_seconds, question)


@fault("the_revision_moves_with_changes_only", seen_in="a counter that every upsert moves")
class AnnouncingMovesTheRevision(MemoryBackend):
    """To announce what is there already moves the revision."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            self._run.revision = self._space.next_number()
            return super().announce(entry, ttl_seconds, question)


@fault(
    "the_revision_moves_with_changes_only", seen_in="etcd's revision, which is the whole store's"
)
class WritingMovesTheRevision(MemoryBackend):
    """A write of the document moves the roster's revision."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            self._run.revision = self._space.next_number()
            return super().set_state(state, token)


@fault("the_revision_moves_with_changes_only", seen_in="the number of members taken for a version")
class RevisionIsACount(_Pulses):
    """The revision is the number of live nodes: one who leaves and one who comes cancel out."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        return replace(pulse, revision=pulse.live)


@fault("a_wiped_roster_is_empty", seen_in="INCR, which begins anew once the server was flushed")
class CountersBeginAnew(MemorySpace):
    """Revisions and tokens count from one, and come back after a loss of data."""

    def wipe(self) -> None:
        with self.changed:
            super().wipe()
            self._counter = itertools.count(1)


# The pulse


@fault("a_withdrawn_node_leaves_a_tombstone", seen_in="COUNT(*) over rows with a 'left' column")
class CountsTombstones(_Pulses):
    """Tombstones are counted as live."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        return replace(pulse, live=len(self.entries()))


@fault("an_entry_expires_unless_it_is_kept_alive", seen_in="ZCARD before ZREMRANGEBYSCORE")
class CountsTheExpired(_Pulses):
    """Entries that have expired are counted until somebody clears them away."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        return replace(pulse, live=sum(not row.withdrawn for row in rows_of(self).values()))


@fault("an_announced_node_is_listed", seen_in="counting 'the others'")
class CountsTheOthers(_Pulses):
    """The caller's own entry is not counted."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        return replace(pulse, live=pulse.live - pulse.present)


@fault("a_pulse_is_exact", seen_in="a check that the key exists")
class SeesPeersThatLeft(_Pulses):
    """A peer that has withdrawn is still told to be live."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        return replace(pulse, peer_live=question.peer_id in rows_of(self))


@fault("a_pulse_is_exact", seen_in="comparison with PAD SPACE")
class ConfirmsWithSpaces(_Pulses):
    """Labels that differ in spaces at the end are counted together."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        label = question.round_label.rstrip()
        live = [one.entry for one in self.entries() if not one.withdrawn]
        count = sum(bool(label) and entry.round_label.rstrip() == label for entry in live)
        return replace(pulse, confirmed=count)


@fault("a_pulse_is_exact", seen_in="counters that are kept beside the entries")
class ConfirmsTheExpired(_Pulses):
    """Entries that have expired still count as confirmed."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        label, rows = question.round_label, rows_of(self).values()
        count = sum(bool(label) and row.entry.round_label == label for row in rows)
        return replace(pulse, confirmed=count)


@fault("a_pulse_is_exact", seen_in="a label that is compared before it is looked at")
class ConfirmsNoLabel(_Pulses):
    """The empty label counts all who have confirmed nothing."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        live = [one.entry for one in self.entries() if not one.withdrawn]
        label = question.round_label
        return replace(pulse, confirmed=sum(entry.round_label == label for entry in live))


@fault("the_clock_of_this_machine_tells_no_age", seen_in="time.time() minus the time of writing")
class AgeByTheReadersClock(_Pulses):
    """The age of the document is told by the clock of whoever asks."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        document = self._run.document
        if document is None:
            return pulse
        age_seconds = client_clock_seconds(self) - document.written_at
        return replace(pulse, state_age_seconds=age_seconds)


@fault("a_beat_leaves_the_document_alone", seen_in="created_at for updated_at")
class AgeSinceCreation(MemoryBackend):
    """The age of the document counts from its first write."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            before: Any = self._run.document
            answer = super().set_state(state, token)
            if before and answer and answer[2]:
                after: Any = self._run.document
                after.written_at = before.written_at
            return answer


@fault("a_beat_leaves_the_document_alone", seen_in="torch's own keep-alives, which are writes")
class BeatWritesTheDocument(MemoryBackend):
    """A beat writes the document anew."""

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            found = self.get_state()
            if found and self._live(node_id):
                self.set_state(*found)
            return super().beat(node_id, ttl_seconds, question)


@fault("the_next_expiry_is_told", seen_in="max() for min()")
class TellsTheLastExpiry(_Pulses):
    """The last entry to expire is told as the next one."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        now = self._space.clock()
        rows = [r for r in rows_of(self).values() if not r.withdrawn and r.expires_at > now]
        last_seconds = max((row.expires_at - now for row in rows), default=None)
        return replace(pulse, next_expiry_seconds=last_seconds)


@fault("the_next_expiry_is_told", seen_in="a query over the rows of those who left too")
class TellsTheExpiryOfTombstones(_Pulses):
    """The next tombstone to expire is told as the next entry."""

    def falsified(self, pulse: Pulse, question: Question) -> Pulse:
        now = self._space.clock()
        rows = [row for row in rows_of(self).values() if row.expires_at > now]
        next_seconds = min((row.expires_at - now for row in rows), default=None)
        return replace(pulse, next_expiry_seconds=next_seconds)


# Entries


@fault(
    "a_changed_entry_is_listed_as_changed", seen_in="ON CONFLICT DO UPDATE with a column missing"
)
class KeepsTheFirstData(MemoryBackend):
    """A change of an entry's data is acknowledged and not written."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            row = self._live(entry.node_id)
            data = row.entry.data if row else entry.data
            pulse = super().announce(entry, ttl_seconds, question)
            written = rows_of(self)[entry.node_id]
            written.entry = replace(entry, data=data)
            return pulse


@fault("node_ids_do_not_meet", seen_in="MySQL's default collations")
class NodesMeetInCase(MemoryBackend):
    """Node ids that differ in case share an entry."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        folded = replace(entry, node_id=entry.node_id.casefold())
        return super().announce(folded, ttl_seconds, question)


@fault("rosters_of_run_ids_do_not_meet", seen_in="KEYS run*, and etcd's get_prefix")
class RostersMeetInPrefixes(MemoryBackend):
    """A run lists the nodes of those whose run id begins like its own."""

    def entries(self) -> list[Listed]:
        with self._space.changed:
            listed: list[Listed] = []
            for run_id in self._space._runs:
                if run_id.startswith(self._run_id):
                    listed += MemoryBackend.entries(type(self)(self._space, run_id))
            return listed


@fault("one_roster_serves_many_threads", seen_in="all entries in one value, read and written back")
class EntriesAreLost(MemoryBackend):
    """All entries are one value that is read, changed and written back: some are lost."""

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        with self._space.changed:
            before = dict(rows_of(self))
        a_moment()
        with self._space.changed:
            pulse = super().announce(entry, ttl_seconds, question)
            self._run.rows = {**before, entry.node_id: rows_of(self)[entry.node_id]}
            return pulse
