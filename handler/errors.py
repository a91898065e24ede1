"""Every error rdzv raises, and how secrets are kept out of them.

The types are torch's own, so that whoever catches those catches ours. This module only gathers
them, adds the one that torch lacks, and masks secrets.
"""

from __future__ import annotations

import re

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
]


class RendezvousSettingsError(RendezvousError, ValueError):
    """An option or an endpoint cannot work as given; the text names it and says what would."""


_USER_PASSWORD = re.compile(r"(?P<head>\w[\w+.-]*://[^/?#\s]*?:)(?P<secret>[^/?#\s]*)(?=@)")
_SECRET_OPTION = re.compile(
    r"(?i)(?P<head>\b(?:[\w-]*(?:password|passwd|pwd|secret|token|api_?key)[\w-]*)\s*[=:]\s*)"
    r"(?P<secret>[^\s&,;'\"]+)"
)


def mask_secrets(text: str) -> str:
    """The text with passwords in URLs and in ``name=value`` pairs replaced by ``***``.

    >>> mask_secrets("redis://user:p%40ss@host:6379/0?password=x&db=1")
    'redis://user:***@host:6379/0?password=***&db=1'
    """
    text = _USER_PASSWORD.sub(r"\g<head>***", text)
    return _SECRET_OPTION.sub(r"\g<head>***", text)
