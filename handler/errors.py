"""Every error rdzv raises, and how secrets are kept out of them.

The types are torch's own, so that whoever catches those catches ours. This module only gathers
them, adds the one that torch lacks, and masks secrets.

Masking errs on the side of hiding: a host or a bracket too many may vanish behind ``***``, a
password must not remain. All of it takes time linear in the text, which may come from a server.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, unquote_plus

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousSettingsError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "mask_secrets",
    "secrets_in",
]

SECRET_CHARACTERS_MIN = 4
"""A known secret shorter than this is masked only where its place gives it away: replacing every
``a`` of a message would garble it and hide nothing."""


class RendezvousSettingsError(RendezvousError, ValueError):
    """An option or an endpoint cannot work as given; the text names it and says what would."""


_SCHEME = re.compile(r"[^:@/]{0,64}://")
_SECRET_VALUE = re.compile(
    r"(?P<name>password|passwd|passphrase|pwd|secret|token|credential|authorization"
    r"|api[_-]?key|access[_-]?key|(?<![a-z])pass(?=\W)|(?<![a-z])pw(?=\W))"
    r"(?![\w-]{0,64}[_-](?:file|path)\b)"
    r"(?P<rest>[\w-]{0,64}['\"]?\s{0,8}(?:=|:(?!//))\s{0,8})"
    r"(?P<value>b?\"(?:[^\"\\]|\\.){0,512}\"|b?'(?:[^'\\]|\\.){0,512}'|(?:(?:bearer|basic)\s{1,8})?[^\s&]+)",
    re.IGNORECASE,
)
"""A name that promises a secret (``sslpassword``, ``AUTH_TOKEN``, ``"password"``; not
``password_file``, which holds a path), then its value, quoted or up to the next blank or ``&``."""
_MYSQL_HINT = re.compile(r"(?i)using password: (?:yes|no)\b")
"""MySQL's "(using password: YES)" holds no secret and is what its reader needs."""


def mask_secrets(text: str, *secrets: str | None) -> str:
    """The text with every secret replaced by ``***``.

    That is: passwords in URLs and in ``user:password@host``, values of names such as
    ``password``, ``token`` or ``api_key``, and each of the known ``secrets`` wherever it stands.

    >>> mask_secrets("redis://user:p%40ss@host:6379/0?password=x&db=1")
    'redis://user:***@host:6379/0?password=***&db=1'
    >>> mask_secrets("no route to hunter22", "hunter22")
    'no route to ***'
    """
    for secret in sorted({s for s in secrets if s}, key=len, reverse=True):
        if len(secret) >= SECRET_CHARACTERS_MIN:
            text = text.replace(secret, "***")
    if "@" in text:
        text = re.sub(r"\S+", _mask_user_password, text)
    return _SECRET_VALUE.sub(_mask_value, text)


def secrets_in(endpoint: str) -> tuple[str, ...]:
    """The secrets an endpoint holds, as written and as decoded, for :func:`mask_secrets`: a
    driver's message may show either.

    >>> secrets_in("redis://user:p%40ss@host/0?token=x+y")
    ('p%40ss', 'p@ss', 'x+y', 'x y')
    """
    found = []
    bounds = _password_bounds(endpoint)
    if bounds is not None:
        written = endpoint[slice(*bounds)]
        found += [written, unquote(written)]
    for match in _SECRET_VALUE.finditer(endpoint):
        found += [match["value"], unquote_plus(match["value"])]
    return tuple(dict.fromkeys(found))


def _mask_user_password(match: re.Match[str]) -> str:
    token = match[0]
    bounds = _password_bounds(token)
    return token if bounds is None else f"{token[: bounds[0]]}***{token[bounds[1] :]}"


def _password_bounds(token: str) -> tuple[int, int] | None:
    """Where the password of a blank-free text is: from the first colon after the scheme to the
    last ``@``, for a password may hold unquoted ``@``, ``/``, ``?`` and ``#``."""
    end = token.rfind("@")
    scheme = _SCHEME.match(token)
    colon = token.find(":", scheme.end() if scheme else 0, max(end, 0))
    return None if colon < 0 else (colon + 1, end)


def _mask_value(match: re.Match[str]) -> str:
    if _MYSQL_HINT.match(match.string, max(match.start() - len("using "), 0)):
        return match[0]
    return f"{match['name']}{match['rest']}***"
