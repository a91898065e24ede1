"""A small key-value server for rendezvous: ``python -m http_rdzv.server --port N --data FILE``.

| request | answer |
|---|---|
| ``GET /`` | 200, the server's name and version |
| ``GET /runs/ID/document`` | 200 with ``ETag`` and the document; 404; 304 after ``If-None-Match`` |
| ``PUT /runs/ID/document`` | 204 with ``ETag``; 412, with the document that is there, if any |
| ``POST /runs/ID/store`` | 200 with what the store's operation gave; 409 for one that is late |

A ``PUT`` needs ``Write-Id``, 32 hexadecimal digits that become the ETag, and ``If-Match`` or
``If-None-Match: *``. A ``GET`` with ``Write-Id`` says in ``Written`` whether that write was made.

There is no password and no TLS: whoever reaches the port may read and write everything. So it
listens on this machine only, unless ``--host`` says otherwise.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import re
import socketserver
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from http_rdzv.space import MUTATIONS, Late, Run, Space

VERSION = "0.1.0"
BODY_BYTES_MAX = 256 << 20
WAIT_SECONDS_MAX = 60.0
RESOURCE = re.compile(r"/runs/([^/]*)/(document|store)")
WRITE_ID = re.compile(r"[0-9a-f]{32}")

# A question about a run, and whether an answer to it is worth no more waiting.
Question = tuple[Callable[..., Any], Callable[[Any], bool]]
QUESTIONS: dict[str, Question] = {
    "get_many": (lambda run, keys: [run.values.get(key) for key in keys], lambda _: True),
    "missing": (
        lambda run, keys: [k for k in keys if k not in run.values and not run.queues.get(k)],
        lambda missing: not missing,
    ),
    "count_keys": (lambda run, prefix: len(_keys(run, prefix)), lambda _: True),
    "list_keys": (lambda run, prefix: _keys(run, prefix), lambda _: True),
    "queue_len": (lambda run, key: len(run.queues.get(key, ())), lambda length: length > 0),
}


def _keys(run: Run, prefix: str) -> list[str]:
    return [key for key in run.values if key.startswith(prefix)]


class Server(socketserver.ThreadingTCPServer):
    """Not ``http.server``'s own, which asks for this machine's name before it listens."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], space: Space) -> None:
        self.space = space
        super().__init__(address, Handler)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = f"rdzv-http/{VERSION}"
    timeout = WAIT_SECONDS_MAX
    wbufsize = -1  # headers and body leave together
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """The greeting, or a document."""
        if self.path == "/":
            self._answer(200, f"rdzv-http {VERSION}\n".encode())
        elif (run_id := self._run_id("document")) is not None:
            write = self.headers.get("Write-Id", "")
            state, etag, written = self._space.document(run_id, write)
            headers = {"Written": "yes" if written else "no"} if write else {}
            if state is None:
                self._answer(404, b"", headers)
            elif self.headers.get("If-None-Match") == f'"{etag}"':
                self._answer(304, b"", {**headers, "ETag": f'"{etag}"'})
            else:
                self._answer(200, base64.b64decode(state), {**headers, "ETag": f'"{etag}"'})

    def do_PUT(self) -> None:
        """A document."""
        run_id, body = self._run_id("document"), self._body()
        if run_id is None or body is None:
            return
        write, match = self.headers.get("Write-Id", ""), self.headers.get("If-Match")
        creates = self.headers.get("If-None-Match") == "*"
        if not WRITE_ID.fullmatch(write) or creates == (match is not None):
            self._answer(428, b"Write-Id and either If-Match or If-None-Match: * are needed")
            return
        expected = None if match is None else match.strip('"')
        if self._space.put(run_id, base64.b64encode(body).decode(), expected, write):
            self._answer(204, b"", {"ETag": f'"{write}"'})
            return
        state, etag, _ = self._space.document(run_id)
        headers = {} if state is None else {"ETag": f'"{etag}"'}
        self._answer(412, base64.b64decode(state or ""), headers)

    def do_POST(self) -> None:
        """An operation of a store."""
        run_id, body = self._run_id("store"), self._body()
        if run_id is None or body is None:
            return
        try:
            status, answer = 200, self._operate(run_id, json.loads(body))
        except Late:
            status, answer = 409, {"error": "a later mutation of this slot has been made"}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
        self._answer(status, json.dumps(answer).encode())

    def _operate(self, run_id: str, request: dict[str, Any]) -> Any:
        do, given = request["do"], request["given"]
        if do in MUTATIONS:
            slot, number = str(request["slot"]), int(request["number"])
            return self._space.mutate(run_id, do, given, slot, number)
        question, is_enough = QUESTIONS[do]
        wait_seconds = min(float(request.get("wait_seconds", 0.0)), WAIT_SECONDS_MAX)
        answer = self._space.look(
            run_id, lambda run: question(run, **given), is_enough, wait_seconds
        )
        return {"answer": answer}

    @property
    def _space(self) -> Space:
        assert isinstance(self.server, Server)
        return self.server.space

    def _run_id(self, resource: str) -> str | None:
        found = RESOURCE.fullmatch(self.path)
        if found is None or found[2] != resource:
            self._refuse(404, b"there is no such resource")
            return None
        return unquote(found[1])

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            self._refuse(413, f"a body of 0 to {BODY_BYTES_MAX} bytes is needed".encode())
            return None
        body = self.rfile.read(int(length))
        # A body that was cut off is no request.
        return body if len(body) == int(length) else None

    def _refuse(self, status: int, text: bytes) -> None:
        # What else the client sends is not read, so the connection cannot serve another request.
        self.close_connection = True
        self._answer(status, text)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Rdzv-Http": VERSION, **(headers or {})}.items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing of single requests."""

    def handle(self) -> None:
        """See base class. A client that has gone away is no error."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()

    def finish(self) -> None:
        """See base class."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().finish()


def main() -> None:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(prog="python -m http_rdzv.server", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: here)")
    parser.add_argument("--port", type=int, required=True, help="0 takes any that is free")
    parser.add_argument("--data", type=Path, help="the journal; without one, memory only")
    arguments = parser.parse_args()
    try:
        space = Space(arguments.data)
        server = Server((arguments.host, arguments.port), space)
    except (OSError, ValueError) as error:
        raise SystemExit(f"rdzv-http cannot start: {error}") from error
    host, port = server.server_address[:2]
    print(f"rdzv-http {VERSION} listens on http://{host!s}:{port}", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
