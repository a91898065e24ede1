"""The Redis backend: a hash for the document, a sorted set by expiry for the roster; streams wake.

Theory. Every operation is one script, which the server runs to its end before any other command:
so each is atomic, costs one round trip and takes all its times from the server's clock. A token is
a version and the id of the write that made it. The version orders; the id makes a token unusable
after its document was lost and made anew, and lets a writer whose answer was lost recognise its own
write by reading again.

Who waits reads two streams of one entry each, from the ids that it has seen together with the
token: what was changed in between is told at once. Who has seen both already, when it read the
document, need not look before it waits. Nothing is told of data that vanish, so a long wait looks
again now and then.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import redis
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.backends.redis_client import (
    RedisConnections,
    RedisOptions,
    logger,
    raw,
)
from rdzv.errors import RendezvousConnectionError, RendezvousError, RendezvousStateError
from rdzv.ports import Closable, Entry, Listed, Located, Pulse, Question, Roster, Token, Watch

NO_TOKEN_OF_OURS = b"-"


class RedisBackend(RendezvousBackend, Roster, Watch, Located, Closable):
    """The records of one run on a Redis or Valkey server, Sentinel group or cluster.

    Nothing is opened before the first call. Raises ``RendezvousSettingsError`` for an endpoint
    that cannot work.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        options: RedisOptions | None = None,
        *,
        name: str = "redis",
    ) -> None:
        self._name = name
        self._redis = RedisConnections(endpoint, run_id, options or RedisOptions())
        base = self._redis.base
        self._state, self._states, self._changes = (
            base + b"state",
            base + b"states",
            base + b"changes",
        )
        self._seen: tuple[Token | None, bytes] | None = None
        """A token, and the id of the last change of the document when it held."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def endpoint(self) -> str:
        return self._redis.endpoint

    @property
    def connections(self) -> RedisConnections:
        """For the store of the same run."""
        return self._redis

    def route(self) -> tuple[str, int] | None:
        return self._redis.route()

    def close(self) -> None:
        self._redis.close()

    def open(self) -> None:
        """Connect, for waiting too, and see whether the user may run what is needed.

        Warns where the server may throw keys away before their time. Raises
        ``RendezvousConnectionError``, also for a user who lacks a right.
        """
        missing = self._redis.run("rights")
        if missing:
            raise self._redis.refused([self._text(name) for name in missing])
        memory = self._redis.ask(_memory)
        self._redis.wait(lambda client: client.pttl(self._state))
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction" and memory.get("maxmemory"):
            logger.warning(
                "Redis at %s has maxmemory-policy %s: short of memory it throws a run's keys away, "
                "and running nodes have to put them back. Use noeviction.",
                self.endpoint,
                policy,
            )

    def get_state(self) -> tuple[bytes, Token] | None:
        held, _, _, _, document = self._look(None)
        return None if held is None else (self._document(document), held)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        write_id = uuid.uuid4().hex
        try:
            written, held, *document = self._redis.run(
                "set_state", _expected(token), write_id, state, self._redis.lifetime_ms
            )
        except RendezvousConnectionError as error:
            if isinstance(error.__cause__, redis.exceptions.ResponseError):
                raise
            # The answer may have been lost, not the write: whose is the one that holds?
            found = self.get_state()
            if found is None or not str(found[1]).endswith(f":{write_id}"):
                raise
            return state, found[1], True
        if written:
            return state, self._token(held), True
        return None if held is None else (self._document(document[0]), self._token(held), False)

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        return self._pulse(
            question,
            self._redis.run(
                "announce",
                raw(entry.node_id),
                raw(entry.round_label),
                entry.data,
                _milliseconds(ttl_seconds),
                uuid.uuid4().hex,
                raw(question.peer_id),
                raw(question.round_label),
                self._redis.lifetime_ms,
            ),
        )

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        return self._pulse(
            question,
            self._redis.run(
                "beat",
                raw(node_id),
                _milliseconds(ttl_seconds),
                raw(question.peer_id),
                raw(question.round_label),
                self._redis.lifetime_ms,
            ),
        )

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        self._redis.run(
            "withdraw",
            raw(node_id),
            _milliseconds(ttl_seconds),
            uuid.uuid4().hex,
            self._redis.lifetime_ms,
        )

    def entries(self) -> list[Listed]:
        live, gone = self._redis.run("entries")
        rows = []
        for node_id, record in zip(live[::2], live[1::2], strict=True):
            arrival, label, data = self._unpacked(record)
            rows.append((arrival, Entry(self._text(node_id), data, label)))
        rows.sort(key=lambda row: row[0])
        return [
            *(Listed(entry) for _, entry in rows),
            *(Listed(Entry(self._text(node_id), b""), withdrawn=True) for node_id in gone),
        ]

    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: Any = None
    ) -> tuple[bytes, Token] | None:
        deadline = time.monotonic() + timeout_seconds
        seen, streams = self._seen, None
        if revision is None and seen is not None and seen[0] == token and timeout_seconds > 0:
            streams = {self._states: seen[1]}
        while True:
            if streams is None:
                held, now_revision, state_id, roster_id, document = self._look(token)
                if held != token:
                    return None if held is None else (self._document(document), held)
                if revision is not None and self._text(now_revision) != revision:
                    return None
                streams = {self._states: state_id}
                if revision is not None:
                    streams[self._changes] = roster_id
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            block_ms = max(1, round(min(left, self._redis.wait_slice_seconds) * 1000))
            told = self._redis.wait(lambda client: client.xread(streams, block=block_ms))  # noqa: B023
            if told and revision is not None and self._states not in _streams_of(told):
                return None
            streams = None

    def _look(self, token: Token | None) -> tuple[str | None, bytes, bytes, bytes, Any]:
        """The token, the revision, the ids of the last changes of document and roster; and the
        document if its token is not ``token``."""
        held, revision, state_id, roster_id, document = self._redis.run("look", _expected(token))
        found = None if held is None else self._token(held)
        self._seen = (found, state_id)
        return found, revision, state_id, roster_id, document

    def _pulse(self, question: Question, answer: list[Any]) -> Pulse:
        held, live, revision, present, peer, confirmed, age_ms, expiry_ms = answer
        return Pulse(
            token=None if held is None else self._token(held),
            live=live,
            revision=self._text(revision),
            present=bool(present),
            peer_live=bool(peer),
            confirmed=confirmed if question.round_label else 0,
            state_age_seconds=None if age_ms is None else max(0, int(age_ms)) / 1000,
            next_expiry_seconds=None if expiry_ms is None else max(0, int(expiry_ms)) / 1000,
        )

    def _document(self, document: Any) -> bytes:
        if not isinstance(document, bytes):
            raise self._foreign("a document")
        return document

    def _token(self, token: bytes) -> str:
        return self._text(token)

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8", "surrogatepass")
        except (UnicodeDecodeError, AttributeError):
            raise self._foreign("a name") from None

    def _unpacked(self, record: Any) -> tuple[int, str, bytes]:
        try:
            arrival, size, rest = record.split(b":", 2)
            length = int(size)
            return int(arrival), self._text(rest[:length]), rest[length:]
        except (ValueError, AttributeError):
            raise self._foreign("a roster entry") from None

    def _foreign(self, what: str) -> RendezvousError:
        return RendezvousStateError(
            f"Redis at {self.endpoint} holds {what} that rdzv has not written below "
            f"{self._redis.base.decode()}: see who else writes there, or use another key_prefix."
        )


def _streams_of(told: Any) -> set[bytes]:
    """Those that an answer to XREAD has entries of: a mapping in newer releases of the protocol."""
    return set(told) if isinstance(told, dict) else {stream for stream, _ in told}


def _memory(client: Any) -> dict[str, Any]:
    try:
        return dict(client.info("memory"))
    except redis.exceptions.ResponseError:
        # Not everybody may ask: then nobody is warned.
        return {}


def _expected(token: Token | None) -> bytes:
    if token is None:
        return b""
    return raw(token) if isinstance(token, str) and token else NO_TOKEN_OF_OURS


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
