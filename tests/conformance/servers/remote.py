"""Servers that the user names: the kit connects to them, and leaves their processes alone."""

from __future__ import annotations

from rdzv.conformance.servers.base import (
    NoAnswer,
    NoControl,
    RealServer,
    ServerUnavailable,
    address_in,
    masked,
    with_address,
)
from rdzv.conformance.servers.technologies import Technology


class RemoteServer(RealServer):
    """A server at a URL. It is asked for its version when this is made. Raises
    :class:`ServerUnavailable` when it does not answer."""

    def __init__(self, technology: Technology, url: str) -> None:
        self._url = url
        self._masked = masked(url)
        try:
            self._address = address_in(url, technology.port)
            self.technology, self.version = technology.ask(url)
        except (NoAnswer, ValueError) as error:
            raise ServerUnavailable(f"{self._masked}: {masked(str(error))}") from error

    @property
    def address(self) -> tuple[str, int]:
        return self._address

    def endpoint(self, address: tuple[str, int] | None = None) -> str:
        return self._url if address is None else with_address(self._url, address)

    def cannot(self, control: str) -> str:
        return (
            f"the server at {self._masked} is yours, not started by this run: leave it out of "
            "--rdzv-servers to have one that may be paused and killed"
        )

    def pause(self) -> None:
        raise NoControl(self.cannot("pause"))

    def resume(self) -> None:
        raise NoControl(self.cannot("pause"))

    def kill(self) -> None:
        raise NoControl(self.cannot("restart"))

    def restart(self, *, keep_data: bool) -> None:
        raise NoControl(self.cannot("restart"))

    def close(self) -> None:
        """Nothing of it is held."""
