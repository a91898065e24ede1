"""What all kinds of servers have in common: errors, URLs, waiting for an answer."""

from __future__ import annotations

import importlib
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from rdzv.conformance.target import Server

ASK_SECONDS_MAX = 2.0
START_SECONDS_MAX = 60.0
POLL_SECONDS = 0.02
USER = PASSWORD = DATABASE = "rdzv"


class ServerUnavailable(RuntimeError):
    """This technology cannot be had here; the message says why and how to get it."""


class ServerFailed(RuntimeError):
    """A server that should run does not; the message ends with what it wrote last."""


class NoControl(RuntimeError):
    """This server is not the kit's to pause, kill or restart."""


class NoAnswer(RuntimeError):
    """A server did not answer."""


def driver(module: str, extra: str) -> Any:
    """The module, imported only now. Raises :class:`ServerUnavailable` with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ServerUnavailable(f"{error}: pip install 'rdzv[{extra}]'") from error


def masked(text: str) -> str:
    """Without secrets."""
    # Imported late, since it imports torch, and the header of a run needs neither.
    from rdzv.errors import mask_secrets

    return mask_secrets(text)


class RealServer(Server):
    """A server with an endpoint. ``technology`` and ``version`` are what it says of itself."""

    @abstractmethod
    def endpoint(self, address: tuple[str, int] | None = None) -> str:
        """What rdzv's backends connect to, and its drivers; through another address, for instance
        a proxy's, where one is given."""

    def cannot(self, control: str) -> str:
        """Why it is not to be paused or restarted (``rdzv.conformance.target.CONTROLS``); ""
        where it is."""
        return ""

    def runs(self) -> bool:
        """Whether it has not ended, as far as that can be seen from here."""
        return True

    @abstractmethod
    def close(self) -> None:
        """End it and remove its data; may be called more than once."""


# What is before the place, the place, and what is after it.
_URL = re.compile(r"((?:[\w+.-]+://)?(?:[^@/]*@)?)([^/?#]*)(.*)", re.DOTALL)


def address_in(url: str, port: int) -> tuple[str, int]:
    """The (first) host and port; ``port`` where the URL has none. ValueError without a host.

    >>> address_in("mysql+pymysql://user:a:b@[::1]/db", 3306)
    ('::1', 3306)
    """
    matched = _URL.fullmatch(url)
    place = matched[2].split(",")[0] if matched else ""
    found = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d+))?", place)
    if found is None:
        raise ValueError(f"no host in {masked(url)!r}")
    return found[1].strip("[]"), int(found[2] or port)


def with_address(url: str, address: tuple[str, int]) -> str:
    """The URL with another host and port.

    >>> with_address("redis://:secret@host:6379/0", ("127.0.0.1", 1))
    'redis://:secret@127.0.0.1:1/0'
    """
    matched = _URL.fullmatch(url)
    assert matched
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{matched[1]}{host}:{address[1]}{matched[3]}"


def wait_for_answer(
    ask: Callable[[], tuple[str, str]], ended: Callable[[], str], log: Callable[[], str]
) -> tuple[str, str]:
    """What the server says of itself, as soon as it says something. ``ended()`` tells why it never
    will. Raises :class:`ServerFailed`."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        end = ended()
        if end:
            raise ServerFailed(f"{end}. Its last words:\n{log()}")
        try:
            return ask()
        except NoAnswer as error:
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"no answer within {START_SECONDS_MAX:.0f} s of its start ({error}). "
                    f"Its last words:\n{log()}"
                ) from error
        threading.Event().wait(POLL_SECONDS)
