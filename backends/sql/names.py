"""Looking up a server's name within a time: the system's own look-up may take minutes, and libpq
sets it no limit. (Nor does PyMySQL, where it is still so.)"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rdzv.address import resolve


def addresses(host: str, seconds: float) -> Sequence[str]:
    """The host's addresses, in the system's order. Raises ``OSError``; ``TimeoutError`` when the
    time is over, where the look-up goes on in a thread that nobody waits for."""
    found: list[Sequence[str] | OSError] = []

    def look_up() -> None:
        try:
            found.append(resolve(host))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=look_up, name="rdzv-sql-names", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError(f"the name {host!r} was not looked up within {seconds:.1f} s")
    if isinstance(found[0], OSError):
        raise OSError(f"the name {host!r} leads nowhere: {found[0]}") from found[0]
    return found[0]
