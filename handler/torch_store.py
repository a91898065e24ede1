"""What every torch Store written in Python needs, whatever it stands on.

Three facts about torch's C++ side decide what is here:

* C++ (``PrefixStore``, gloo, RPC) calls a Python store by its Python spelling, but ``delete_key``
  and ``num_keys`` it calls ``deleteKey`` and ``getNumKeys``: both spellings must exist.
* C++ writes the timeout into a field of the base class without telling the subclass, so the field
  is read again at every call that may block, and never remembered.
* From C++ come ``str`` keys, ``bytes`` values and ``timedelta`` timeouts; from Python comes
  whatever torch's own bindings accept, so the same is accepted and refused here.
"""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, SupportsIndex

import torch.distributed as dist

Text = str | bytes | bytearray
"""A key or a value as torch's bindings accept it: text is UTF-8."""

KEYS_SHOWN_MAX = 8
KEY_CHARACTERS_SHOWN_MAX = 80

QueueEmptyError: type[Exception] = getattr(dist, "QueueEmptyError", dist.DistStoreError)
"""What a pop of an empty queue raises. Older releases of torch have no type of its own for it."""


class TorchStore(dist.Store):
    """The parts of a Python store that do not depend on where the data is."""

    if TYPE_CHECKING:

        @property
        def timeout(self) -> timedelta:
            """The field of the C++ half, which torch's stubs forget."""

    def deleteKey(self, key: Text) -> bool:
        """``delete_key`` under the name that C++ calls."""
        return self.delete_key(key)  # type: ignore[arg-type]

    def getNumKeys(self) -> int:
        """``num_keys`` under the name that C++ calls."""
        return self.num_keys()

    def barrier(self, key: Text, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Return when ``world_size`` callers have come to the barrier named ``key``.

        It counts callers, not ranks, and serves once: later callers pass at once. Raises
        ``DistStoreError`` after ``timeout`` (the store's own where it is None); a caller that
        timed out has been counted all the same.
        """
        name, size = key_text(key), whole_number(world_size, "world_size")
        if self.add(f"{name}/num_members", 1) == size:
            self.set(f"{name}/last_member", "1")
        if timeout is None:
            self.wait([f"{name}/last_member"])
        else:
            self.wait([f"{name}/last_member"], timeout)  # type: ignore[arg-type]

    def _deadline(self, timeout: timedelta | float | None = None) -> Deadline:
        return Deadline(timeout_seconds(self.timeout if timeout is None else timeout))


class Deadline:
    """The end of one call that may block. Zero and negative timeouts allow one look."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining_seconds(self, at_most: float) -> float:
        """What is left, between 0 and ``at_most``; so nobody has to sleep for INT_MAX ms."""
        return max(0.0, min(at_most, self._end - time.monotonic()))

    @property
    def elapsed_seconds(self) -> float:
        """How long ago the call began."""
        return time.monotonic() - (self._end - self.seconds)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end


class Backoff:
    """Pauses that double from first to last, each shortened by chance to as little as a half."""

    def __init__(self, first_seconds: float, last_seconds: float) -> None:
        self._next_seconds = first_seconds
        self._last_seconds = last_seconds

    def pause_seconds(self, deadline: Deadline) -> float:
        """How long to pause next: not beyond the deadline."""
        seconds = self._next_seconds * random.uniform(0.5, 1.0)
        self._next_seconds = min(2 * self._next_seconds, self._last_seconds)
        return deadline.remaining_seconds(seconds)

    def sleep(self, deadline: Deadline) -> None:
        """Sleep for the next pause. Signal handlers run meanwhile."""
        time.sleep(self.pause_seconds(deadline))


def key_text(key: object) -> str:
    """A key as ``str``.

    Raises ``TypeError`` for what torch's bindings refuse, lone surrogates included, and
    ``ValueError`` for bytes that are not UTF-8.
    """
    if isinstance(key, str):
        if not key.isascii():
            _utf8(key, "key")
        return key
    if isinstance(key, (bytes, bytearray)):
        return key.decode("utf-8")
    raise TypeError(f"a store's key is str, bytes or bytearray, not {type(key).__name__}")


def value_bytes(value: object) -> bytes:
    """A value as ``bytes``. Raises ``TypeError`` for what torch's bindings refuse."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _utf8(value, "value")
    if isinstance(value, bytearray):
        return bytes(value)
    raise TypeError(f"a store's value is str, bytes or bytearray, not {type(value).__name__}")


def key_list(keys: Iterable[object]) -> list[str]:
    """Several keys. Raises ``TypeError`` for a single one, which would be read letter by letter."""
    if isinstance(keys, (str, bytes, bytearray)):
        raise TypeError(f"expected a list of keys, not one key of type {type(keys).__name__}")
    return [key_text(key) for key in keys]


def keys_and_values(
    keys: Iterable[object], values: Iterable[object]
) -> tuple[list[str], list[bytes]]:
    """What ``multi_set`` got. Raises ``ValueError`` for unequal lengths, on which torch's own
    stores differ between an error, silence and a crash."""
    if isinstance(values, (str, bytes, bytearray)):
        raise TypeError(f"expected a list of values, not one {type(values).__name__}")
    names, contents = key_list(keys), [value_bytes(value) for value in values]
    if len(names) != len(contents):
        raise ValueError(f"multi_set of {len(names)} keys and {len(contents)} values")
    return names, contents


def whole_number(value: SupportsIndex, what: str) -> int:
    """An int that fits into C++'s int64. Raises ``TypeError`` else, as torch's bindings do."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, not {type(value).__name__}") from None
    if not -(2**63) <= number < 2**63:
        raise TypeError(f"{what} must fit into 64 bits, got {number}")
    return number


def timeout_seconds(timeout: object) -> float:
    """A timeout, which may be a ``timedelta`` or a number of seconds, in seconds."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        return float(timeout)
    raise TypeError(f"a timeout is a timedelta or seconds, not {type(timeout).__name__}")


def shown_keys(keys: Iterable[str]) -> str:
    """Keys for a message, in a length that a log can bear."""
    names = list(keys)
    shown = [
        name if len(name) <= KEY_CHARACTERS_SHOWN_MAX else name[:KEY_CHARACTERS_SHOWN_MAX] + "..."
        for name in names[:KEYS_SHOWN_MAX]
    ]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(repr(name) for name in shown) + more


def wait_timeout_error(deadline: Deadline, keys: Iterable[str], where: str) -> dist.DistStoreError:
    """The error of a wait that ended in vain: how long, for which keys, where."""
    return dist.DistStoreError(
        f"wait timeout after {deadline.seconds:g} s on {where}: nobody has set {shown_keys(keys)}. "
        "Whoever should have may have failed: look at its log, or raise the store's timeout."
    )


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TypeError(f"a store's {what} must be valid Unicode: {error}") from error
