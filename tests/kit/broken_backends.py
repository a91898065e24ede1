"""Broken backends: the document, its tokens, and errors."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from typing import Any

from kit.catalogue import RemoteBackend, RemoteSpace, a_moment, catalogue

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.errors import RendezvousConnectionError

fault = catalogue("backend")


def document_of(backend: MemoryBackend) -> Any:
    """The run's document, which is there; the caller holds the lock."""
    return backend._run.document


# Compare and set


@fault(
    "a_write_without_token_only_creates",
    seen_in="SET without NX for the first write, in home-made Redis backends",
)
class BlindFirstWrite(MemoryBackend):
    """A write without a token overwrites what is there."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            found = self.get_state()
            return super().set_state(state, found[1] if token is None and found else token)


@fault(
    "equal_bytes_are_a_new_version",
    seen_in="torch's C10dRendezvousBackend, whose token is the document itself",
)
class ComparesValues(MemoryBackend):
    """The document's own bytes serve as its version: what was there before passes for now."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            answer = super().set_state(state, token)
            if answer and answer[2]:
                document_of(self).token = state.hex()
            return answer and (answer[0], document_of(self).token, answer[2])


@fault(
    "equal_bytes_are_a_new_version",
    seen_in="MySQL's count of changed rows, which is 0 for an UPDATE to equal values",
)
class RefusesEqualBytes(MemoryBackend):
    """A write of the bytes that are there already is taken for a lost race."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            found = self.get_state()
            if found and found[0] == state:
                return (*found, False)
            return super().set_state(state, token)


@fault("equal_bytes_are_a_new_version", seen_in="entity tags of HTTP that are a hash of the body")
class KeepsTokenForEqualBytes(MemoryBackend):
    """A write of equal bytes succeeds and leaves the token as it was."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            found = self.get_state()
            if found and found == (state, token):
                return state, token, True
            return super().set_state(state, token)


@fault(
    "a_lost_document_makes_all_tokens_stale",
    seen_in="ZooKeeper's version of a node, which begins anew once the node was deleted",
)
class CountsAnewAfterLoss(MemoryBackend):
    """Versions count from one for each document, so that a token comes back after a loss."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            found = self.get_state()
            answer = super().set_state(state, token)
            if answer and answer[2]:
                version = int(found[1].rpartition("-")[2]) + 1 if found else 1
                document_of(self).token = f"{self._run_id}-{version}"
            return answer and (answer[0], document_of(self).token, answer[2])


@fault(
    "a_token_that_was_never_ours_loses",
    seen_in="row versions that count from one in every row",
)
class CountsPerRun(MemoryBackend):
    """Versions count from one in every run: another run's token fits."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            document = self._run.document
            version = int(document.token.rpartition(".")[2]) + 1 if document else 1
            answer = super().set_state(state, token)
            if answer and answer[2]:
                document_of(self).token = f"version.{version}"
            return answer and (answer[0], document_of(self).token, answer[2])


@fault(
    "no_write_is_lost_among_many_writers",
    seen_in="GET and SET without WATCH or a script, the commonest home-made Redis backend",
)
class GetsThenSets(MemoryBackend):
    """The comparison and the write of a document are two requests."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        found = self.get_state()
        if (found and found[1]) != token:
            return found and (*found, False)
        a_moment()
        with self._space.changed:
            now = self.get_state()
            return super().set_state(state, now and now[1])


@fault("a_write_with_the_token_replaces", seen_in="returning the row as it was read before UPDATE")
class ReturnsOldToken(MemoryBackend):
    """A successful write returns the token that it replaced."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        answer = super().set_state(state, token)
        return (answer[0], token, True) if answer and answer[2] and token else answer


@fault("a_write_with_the_token_replaces", seen_in="etcd's prev_kv, and Redis' SET with GET")
class ReturnsOldState(MemoryBackend):
    """A successful write returns the document that it replaced."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            found = self.get_state()
            answer = super().set_state(state, token)
            return (found[0], *answer[1:]) if found and answer and answer[2] else answer


@fault("a_stale_token_loses", seen_in="reading torch's None as an answer to any write that lost")
class NoneForALostRace(MemoryBackend):
    """A write that has lost returns None, though there is a document."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        answer = super().set_state(state, token)
        return answer if answer and answer[2] else None


@fault("a_stale_token_loses", seen_in="ignoring the count of rows that an UPDATE has touched")
class AlwaysSuccessful(MemoryBackend):
    """A write that has lost is told as a success."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        answer = super().set_state(state, token)
        return answer and (*answer[:2], True)


@fault("an_empty_backend_has_no_document", seen_in="upserts, which insert where nothing matches")
class CreatesForAnyToken(MemoryBackend):
    """A write with a token creates where there is no document to replace."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            return super().set_state(state, token if self.get_state() else None)


@fault(
    "a_token_that_was_never_ours_loses",
    raises=(ValueError,),
    seen_in="int(token) without a thought for tokens of another backend or of a later version",
)
class RaisesForForeignTokens(MemoryBackend):
    """A token that it cannot read raises, where the write has merely lost."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        if token is not None:
            int(str(token).removeprefix("memory-"))
        return super().set_state(state, token)


@fault(
    "a_write_with_the_token_replaces",
    seen_in="reads from a replica, and etcd's serializable reads",
)
class ReadsItsOwnWrites(MemoryBackend):
    """A read is answered from what this client has written itself."""

    _seen: Any = None

    def get_state(self) -> Any:
        return self._seen or super().get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        answer = super().set_state(state, token)
        self._seen = answer and answer[:2]
        return answer


@fault(
    "one_object_serves_many_threads",
    seen_in="one cursor or connection for all threads: PyMySQL's 'Packet sequence number wrong'",
)
class OneAnswerForAllThreads(MemoryBackend):
    """Threads that call at once may get each other's answers."""

    _answer: Any = None

    def get_state(self) -> Any:
        answer = self._answer = super().get_state()
        a_moment()
        return answer and self._answer

    def set_state(self, state: bytes, token: Any = None) -> Any:
        self._answer = super().set_state(state, token)
        a_moment()
        return self._answer


# Bytes


@fault("any_bytes_come_back_unchanged", seen_in="redis-py with decode_responses=True")
class TextForBytes(MemoryBackend):
    """A document comes back as text."""

    def get_state(self) -> Any:
        found = super().get_state()
        return found and (found[0].decode("latin-1"), found[1])


@fault("any_bytes_come_back_unchanged", seen_in="psycopg2's bytea, and sqlite3's blobs of old")
class MemoryviewForBytes(MemoryBackend):
    """A document comes back as a memoryview: equal to bytes, and not to be unpickled or sliced
    as they are."""

    def get_state(self) -> Any:
        found = super().get_state()
        return found and (memoryview(found[0]), found[1])


@fault("every_answer_to_a_write_holds_bytes", seen_in="MySQL Connector/Python's raw cursors")
class BytearrayForALostRace(MemoryBackend):
    """A write that has lost returns the document as a bytearray."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        answer = super().set_state(state, token)
        return answer and (answer[0] if answer[2] else bytearray(answer[0]), *answer[1:])


class _Mangles(MemoryBackend):
    """Stores another document than it was given."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        answer = super().set_state(self.mangled(state), token)
        return (state, *answer[1:]) if answer and answer[2] else answer

    def mangled(self, state: bytes) -> bytes:
        raise NotImplementedError


@fault("a_document_may_have_a_megabyte", seen_in="MySQL's BLOB outside strict mode")
class TruncatesAt64K(_Mangles):
    """A document is cut off after 65,535 bytes, without an error."""

    def mangled(self, state: bytes) -> bytes:
        return state[:65535]


@fault("any_bytes_come_back_unchanged", seen_in="strings of C, and text columns")
class EndsAtNul(_Mangles):
    """A document ends at its first NUL."""

    def mangled(self, state: bytes) -> bytes:
        return state.partition(b"\0")[0]


@fault("any_bytes_come_back_unchanged", seen_in="errors='replace' on the way to a text column")
class ReplacesWhatIsNoText(_Mangles):
    """What is no UTF-8 in a document is replaced."""

    def mangled(self, state: bytes) -> bytes:
        return state.decode("utf-8", "replace").encode()


@fault("blanks_at_the_ends_of_a_document_stay", seen_in="strip() of a file or of a body of HTTP")
class StripsBlanks(_Mangles):
    """Blanks and line ends at the end of a document are lost."""

    def mangled(self, state: bytes) -> bytes:
        return state.rstrip(b" \t\r\n")


@fault("any_bytes_come_back_unchanged", seen_in="'if not value: return None'")
class EmptyIsNone(MemoryBackend):
    """An empty document is taken for none."""

    def get_state(self) -> Any:
        found = super().get_state()
        return found if found and found[0] else None


# Runs


@fault("run_ids_do_not_meet", seen_in="MySQL's default collations, and file systems of Macs")
class RunsMeetInCase(MemoryBackend):
    """Run ids that differ in case share a document."""

    def __init__(self, space: MemorySpace, run_id: str) -> None:
        super().__init__(space, run_id.casefold())


@fault("run_ids_do_not_meet", seen_in="CHAR columns, and comparison with PAD SPACE")
class RunsMeetInTrailingSpaces(MemoryBackend):
    """Run ids that differ in spaces at the end share a document."""

    def __init__(self, space: MemorySpace, run_id: str) -> None:
        super().__init__(space, run_id.rstrip(" "))


@fault("run_ids_do_not_meet", seen_in="VARCHAR(64) outside strict mode")
class RunsMeetAfter64Characters(MemoryBackend):
    """Run ids that begin with the same 64 characters share a document."""

    def __init__(self, space: MemorySpace, run_id: str) -> None:
        super().__init__(space, run_id[:64])


@fault("run_ids_do_not_meet", seen_in="file systems and collations that normalise Unicode")
class RunsMeetInUnicode(MemoryBackend):
    """Run ids that are the same characters composed in another way share a document."""

    def __init__(self, space: MemorySpace, run_id: str) -> None:
        super().__init__(space, unicodedata.normalize("NFC", run_id))


@fault("run_ids_do_not_meet", seen_in="keys that are paths: files, HTTP, ZooKeeper, Consul")
class RunsMeetInPaths(MemoryBackend):
    """Run ids that name the same path share a document."""

    def __init__(self, space: MemorySpace, run_id: str) -> None:
        super().__init__(space, posixpath.normpath(f"/runs/{run_id}"))


@fault("run_ids_do_not_meet", seen_in="run ids made fit for names of tables and Kubernetes")
class RunsMeetWhenSanitised(MemoryBackend):
    """Run ids that differ in odd characters share a document."""

    def __init__(self, space: MemorySpace, run_id: str) -> None:
        super().__init__(space, re.sub(r"\W", "_", run_id, flags=re.ASCII))


@fault("run_ids_do_not_meet", seen_in="etcd's get_prefix, and LIKE 'run%'")
class RunsMeetInPrefixes(MemoryBackend):
    """A run sees the newest document of those whose run id begins like its own."""

    def get_state(self) -> Any:
        with self._space.changed:
            documents = [
                run.document
                for run_id, run in self._space._runs.items()
                if run_id.startswith(self._run_id) and run.document
            ]
            return (documents[-1].state, documents[-1].token) if documents else None


# Outages


@fault("calls_to_a_paused_server_fail_in_time", seen_in="'except Exception: return None'")
class SwallowsOutages(RemoteBackend):
    """A lost connection looks like an empty backend."""

    def get_state(self) -> Any:
        try:
            return super().get_state()
        except RendezvousConnectionError:
            return None


@fault("calls_to_a_paused_server_fail_in_time", seen_in="drivers whose errors are let through")
class RaisesConnectionErrors(RemoteBackend):
    """A lost connection raises the driver's own error."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        try:
            return super().set_state(state, token)
        except RendezvousConnectionError as error:
            raise ConnectionResetError("connection reset by peer") from error


@fault(
    "calls_to_a_paused_server_fail_in_time",
    seen_in="read timeouts, for which drivers have a type of their own",
)
class RaisesReadTimeouts(RemoteBackend):
    """A server that does not answer raises TimeoutError."""

    def get_state(self) -> Any:
        try:
            return super().get_state()
        except RendezvousConnectionError as error:
            raise TimeoutError("timed out") from error


@fault("calls_to_a_paused_server_fail_in_time", seen_in="torch's TCPStore after a lost connection")
class StaysBroken(RemoteBackend):
    """After one lost connection every later call fails too."""

    _is_broken = False

    def check_reach(self) -> None:
        if self._is_broken or not self._space.answers:
            self._is_broken = True
            raise RendezvousConnectionError("the connection is closed")


@fault(
    "calls_to_a_paused_server_fail_in_time", hangs=True, seen_in="sockets without a read timeout"
)
class WaitsForThePaused(RemoteBackend):
    """A call to a server that does not answer waits until it does."""

    def check_reach(self) -> None:
        self._space.changed.wait_for(lambda: self._space.answers)


@fault("calls_to_a_paused_server_fail_in_time", seen_in="clients that fall back to a cache")
class AnswersFromItsCache(RemoteBackend):
    """While the server is away reads are answered with what this client has seen last."""

    _last: Any = None

    def get_state(self) -> Any:
        try:
            self._last = super().get_state()
        except RendezvousConnectionError:
            if self._last is None:
                raise
        return self._last

    def set_state(self, state: bytes, token: Any = None) -> Any:
        answer = super().set_state(state, token)
        self._last = answer and answer[:2]
        return answer


@fault("a_document_outlives_a_crash", seen_in="Redis without appendfsync always")
class ForgetsInACrash(RemoteSpace):
    """What was acknowledged is gone after a crash, though the data was kept."""

    def crash(self) -> None:
        super().crash()
        self.wipe()
