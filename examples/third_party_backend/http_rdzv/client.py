"""One HTTP request and its answer, or how far it came.

Every request has a connection of its own. That costs a loopback or LAN round trip and buys much:
any thread may call, nothing has to be closed, and no request is lost on a connection that the
server has given up since the last one. A request has one deadline for all of its parts.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from rdzv.errors import RendezvousSettingsError, mask_secrets

SERVER_HEADER = "Rdzv-Http"
"""In every answer of our server, and of no other: a proxy's error page is no answer."""
CHUNK_BYTES = 1 << 16


class NotAnswered(Exception):
    """The server could not be asked, or did not answer in time."""

    was_sent = True
    """Whether the server may have got the request, and may yet do what it asks."""


class NotSent(NotAnswered):
    """The server has not got the request."""

    was_sent = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """The server at an endpoint, for one run. Holds no connection and may be used by any thread.

    ``timeout_seconds`` is the longest time that :meth:`request` takes. Raises
    ``RendezvousSettingsError`` for an endpoint that cannot work.
    """

    def __init__(self, endpoint: str, run_id: str, timeout_seconds: float) -> None:
        self.endpoint = mask_secrets(endpoint)
        self.host, self.port = _address_in(endpoint)
        self.timeout_seconds = timeout_seconds
        # "." is quoted too, for whoever takes "/../" for a step up.
        self._path = "/runs/" + quote(run_id, safe="").replace(".", "%2E")

    def request(
        self,
        method: str,
        resource: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        wait_seconds: float = 0.0,
    ) -> Answer:
        """The server's answer, to a request that it may take ``wait_seconds`` to answer.

        Raises ``NotAnswered``, and nothing else, where there is none.
        """
        deadline = time.monotonic() + self.timeout_seconds + wait_seconds
        connection = http.client.HTTPConnection(self.host, self.port, self.timeout_seconds)
        try:
            connection.connect()
        except OSError as error:
            raise NotSent(f"cannot connect to {self.endpoint}: {error}") from error
        try:
            connection.sock.settimeout(_left(deadline))
            connection.request(method, f"{self._path}/{resource}", body, dict(headers or {}))
            return self._read(connection, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            text = str(error) or type(error).__name__
            raise NotAnswered(f"no answer from {self.endpoint}: {text}") from error
        finally:
            connection.close()

    def _read(self, connection: http.client.HTTPConnection, deadline: float) -> Answer:
        # getresponse() lets go of the socket where it is to be closed after the answer.
        socket = connection.sock
        socket.settimeout(_left(deadline))
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        if SERVER_HEADER.lower() not in headers:
            raise http.client.HTTPException(
                f"what answers there (status {response.status}) is no server of rdzv-http"
            )
        body, size_bytes = bytearray(), int(headers.get("content-length", "0"))
        while len(body) < size_bytes:
            socket.settimeout(_left(deadline))
            chunk = response.read1(min(CHUNK_BYTES, size_bytes - len(body)))
            if not chunk:
                raise http.client.HTTPException(f"the answer was cut off after {len(body)} bytes")
            body += chunk
        return Answer(response.status, headers, bytes(body))


def explanation(answer: Answer) -> str:
    """What an answer says that is none of those that the caller knows."""
    return f"status {answer.status}: {answer.body[:200].decode('utf-8', 'replace')}"


def to_json(value: object) -> bytes:
    """A request's or an answer's body."""
    return json.dumps(value, separators=(",", ":")).encode()


def _left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def _address_in(endpoint: str) -> tuple[str, int]:
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        host, port = parts.hostname, parts.port
        usual = parts.scheme == "http" and parts.path in ("", "/") and "@" not in parts.netloc
    except ValueError:
        host, port, usual = None, None, False
    if not host or not port or not usual:
        raise RendezvousSettingsError(
            f"--rdzv-endpoint={mask_secrets(endpoint)!r} cannot work: give http://HOST:PORT, where "
            "`python -m http_rdzv.server --port PORT` runs."
        )
    return host, port
