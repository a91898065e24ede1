"""The store: rdzv's base does torch's side of it, and asks a client for single operations.

An operation is a ``POST`` with JSON. The server recognises a mutation that comes again: each is
sent in a *slot* with a number. A slot makes one mutation at a time, and its next one, with the
next number, says that the answer to the one before has come; so the server remembers one answer
for each slot, and refuses what comes late.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from http_rdzv.client import HttpClient, NotAnswered, explanation, to_json
from rdzv.stores.base import Store, StoreClient, Unanswered

REQUEST_SECONDS_MAX = 5.0
"""So long the server may take to answer what needs no waiting."""
WAIT_SECONDS_MAX = 5.0
"""The server is asked to hold a wait so long; the store asks again until its own timeout."""
ABANDONED_MAX = 1000
"""Mutations whose callers have given up, and whose slots are not used again, that are remembered
for a repeat that will hardly come."""


class HttpStore(Store):
    """A ``torch.distributed.Store`` on a server of :mod:`http_rdzv.server`, in the name of a run.

    ``timeout`` None means torch's default of 300 seconds. Within it a request that has not been
    answered for ``request_seconds_max`` is made again. Raises ``RendezvousSettingsError`` for an
    endpoint that cannot work.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        timeout: timedelta | None = None,
        request_seconds_max: float = REQUEST_SECONDS_MAX,
    ) -> None:
        client = HttpStoreClient(endpoint, run_id, request_seconds_max)
        super().__init__(client, timeout=timeout)


class HttpStoreClient(StoreClient):
    """The keys of one run on a server."""

    def __init__(self, endpoint: str, run_id: str, request_seconds_max: float) -> None:
        self._client = HttpClient(endpoint, run_id, request_seconds_max)
        self._slots = Slots()
        self.endpoint = self._client.endpoint

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [_optional(text) for text in self._ask("get_many", keys=keys)]

    def set_many(self, pairs: Sequence[tuple[str, bytes]], operation: str) -> None:
        self._change("set_many", operation, pairs=[(key, _text(value)) for key, value in pairs])

    def add(self, key: str, amount: int, operation: str) -> int:
        total: int = self._change("add", operation, key=key, amount=amount)
        return total

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        pair = {"expected": _text(expected), "desired": _text(desired)}
        return _optional(self._change("compare_set", operation, key=key, **pair))

    def append(self, key: str, value: bytes, operation: str) -> None:
        bytes_max = self.value_bytes_max
        self._change("append", operation, key=key, value=_text(value), bytes_max=bytes_max)

    def delete(self, key: str, operation: str) -> bool:
        was_there: bool = self._change("delete", operation, key=key)
        return was_there

    def missing(self, keys: Sequence[str]) -> list[str]:
        return self.wait_for_keys(keys, 0.0)

    def count_keys(self, prefix: str) -> int:
        count: int = self._ask("count_keys", prefix=prefix)
        return count

    def list_keys(self, prefix: str) -> list[str]:
        keys: list[str] = self._ask("list_keys", prefix=prefix)
        return keys

    def queue_push(self, key: str, value: bytes, operation: str) -> None:
        self._change("queue_push", operation, key=key, value=_text(value))

    def queue_pop(self, key: str, operation: str) -> bytes | None:
        return _optional(self._change("queue_pop", operation, key=key))

    def queue_len(self, key: str) -> int:
        length: int = self._ask("queue_len", key=key)
        return length

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        missing: list[str] = self._ask("missing", timeout_seconds, keys=keys)
        return missing

    def wait_for_queue(self, key: str, timeout_seconds: float) -> bool:
        length: int = self._ask("queue_len", timeout_seconds, key=key)
        return length > 0

    def close(self) -> None:
        """Nothing to give up: every request has a connection of its own."""

    def _ask(self, do: str, wait_seconds: float = 0.0, **given: Any) -> Any:
        wait_seconds = min(wait_seconds, WAIT_SECONDS_MAX)
        return self._send({"do": do, "given": given, "wait_seconds": wait_seconds}, wait_seconds)

    def _change(self, do: str, operation: str, **given: Any) -> Any:
        slot, number = self._slots.take(operation)
        try:
            answer = self._send({"do": do, "given": given, "slot": slot, "number": number})
        except ValueError:
            self._slots.give_back(operation)  # the server has answered, with a refusal
            raise
        self._slots.give_back(operation)
        return answer

    def _send(self, request: dict[str, Any], wait_seconds: float = 0.0) -> Any:
        try:
            answer = self._client.request(
                "POST", "store", to_json(request), wait_seconds=wait_seconds
            )
        except NotAnswered as error:
            raise Unanswered(str(error)) from error
        if answer.status >= 500:
            raise Unanswered(f"{self.endpoint} answered {explanation(answer)}")
        if answer.status != 200:
            raise dist.DistStoreError(f"{self.endpoint} answered {explanation(answer)}")
        found = json.loads(answer.body)
        if "error" in found:
            raise ValueError(found["error"])
        return found["answer"]


class Slots:
    """Which slot and number each mutation has."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._client = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._made = 0
        self._idle: list[tuple[str, int]] = []
        self._open: dict[str, tuple[str, int]] = {}

    def take(self, operation: str) -> tuple[str, int]:
        """The same for the same operation until it is given back."""
        if self._process != os.getpid():
            # A forked process that went on with the slots of its parent would pass for it.
            Slots.__init__(self)
        with self._lock:
            if operation not in self._open:
                if self._idle:
                    slot, number = self._idle.pop()
                else:
                    self._made += 1
                    slot, number = f"{self._client}-{self._made}", 0
                self._open[operation] = slot, number + 1
                while len(self._open) > ABANDONED_MAX:
                    self._open.pop(next(iter(self._open)))
            return self._open[operation]

    def give_back(self, operation: str) -> None:
        """The operation has been answered."""
        with self._lock:
            taken = self._open.pop(operation, None)
            if taken is not None:
                self._idle.append(taken)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _optional(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
