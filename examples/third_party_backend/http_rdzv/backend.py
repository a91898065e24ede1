"""The backend: one document at one URL, and HTTP's own compare-and-set.

``GET`` gives the document and its ``ETag``. ``PUT`` with ``If-Match: "<etag>"`` replaces just that
version, with ``If-None-Match: *`` it only creates; where it does not fit, the answer is 412 and
holds the document that is there. The token is the ETag, and the ETag is an id that the writer has
made up for this one write. So no token is ever used twice, not even by a server that has lost all
of its data, and a writer whose answer was lost recognises its own write when it reads again.

rdzv keeps the roster inside the document and asks again and again for changes, since this backend
has neither interface. It has ``Located``, so that nodes tell their peers an address that can be
reached from there.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from http_rdzv.client import Answer, HttpClient, NotAnswered, explanation
from rdzv.errors import RendezvousConnectionError, RendezvousStateError
from rdzv.ports import Located, Token

REQUEST_SECONDS_MAX = 5.0
"""A server that takes longer to answer is taken to be gone."""
TOKEN = re.compile(r"[0-9a-f]{32}")


class HttpRendezvousBackend(RendezvousBackend, Located):
    """The document of one run on a server of :mod:`http_rdzv.server`.

    A call makes one request, or two where the answer to a write was lost. Raises
    ``RendezvousSettingsError`` for an endpoint that cannot work.
    """

    def __init__(
        self, endpoint: str, run_id: str, request_seconds_max: float = REQUEST_SECONDS_MAX
    ) -> None:
        self._client = HttpClient(endpoint, run_id, request_seconds_max)
        # What was read last: the server need not send it again.
        self._known: tuple[bytes, str] | None = None

    @property
    def name(self) -> str:
        """See base class."""
        return "http"

    @property
    def endpoint(self) -> str:
        """See base class."""
        return self._client.endpoint

    def route(self) -> tuple[str, int]:
        """See base class."""
        return self._client.host, self._client.port

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        known = self._known
        headers = {} if known is None else {"If-None-Match": f'"{known[1]}"'}
        try:
            answer = self._client.request("GET", "document", headers=headers)
        except NotAnswered as error:
            raise RendezvousConnectionError(str(error)) from error
        if answer.status == 304 and known is not None:
            return known
        found = self._known = self._document_in(answer)
        return found

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        if token is not None and not _is_token(token):
            found = self.get_state()
            return None if found is None else (*found, False)
        write = uuid.uuid4().hex
        condition = {"If-None-Match": "*"} if token is None else {"If-Match": f'"{token}"'}
        try:
            answer = self._client.request(
                "PUT", "document", state, {"Write-Id": write, **condition}
            )
        except NotAnswered as error:
            if not error.was_sent:
                raise RendezvousConnectionError(str(error)) from error
            return self._fate_of(write, state, token, error)
        if answer.status == 204:
            return state, write, True
        found = self._document_in(answer)
        return None if found is None else (*found, False)

    def _fate_of(
        self, write: str, state: bytes, token: Token | None, reason: NotAnswered
    ) -> tuple[bytes, Token, bool] | None:
        """What became of a write whose answer was lost."""
        try:
            answer = self._client.request("GET", "document", headers={"Write-Id": write})
        except NotAnswered:
            raise RendezvousConnectionError(str(reason)) from reason
        found = self._document_in(answer)
        if answer.headers.get("written") == "yes":
            return state, write, True
        if token == (None if found is None else found[1]):
            # It would still fit, and so may be made yet, if it is on its way.
            raise RendezvousConnectionError(f"{reason}; the write may be made later") from reason
        return None if found is None else (*found, False)

    def _document_in(self, answer: Answer) -> tuple[bytes, str] | None:
        if answer.status == 404 or (answer.status == 412 and "etag" not in answer.headers):
            return None
        if answer.status not in (200, 412):
            raise RendezvousConnectionError(f"{self.endpoint} answered {explanation(answer)}")
        token = answer.headers.get("etag", "").strip('"')
        if not _is_token(token):
            raise RendezvousStateError(
                f"{self.endpoint} has {len(answer.body)} bytes for this run with the ETag "
                f"{token[:80]!r}, which rdzv-http did not write. They are left as they are: use "
                "another run id, or another server."
            )
        return answer.body, token


def _is_token(token: Any) -> bool:
    return isinstance(token, str) and TOKEN.fullmatch(token) is not None
