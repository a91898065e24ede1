"""What the kit asks of those who want to know whether a training job can trust their backend.

One object, a :class:`Target`: it opens backends and stores that meet on the same data, which is
empty when a clause begins. Whatever else it can do makes more clauses possible; those that it
leaves impossible are listed as not run, with what they lack.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

DEADLINE_SECONDS = 20.0

CONTROLS = {
    "wipe": "lose all data while clients are connected (Target.wipe)",
    "store": "open a store (Target.store)",
    "corrupt": "put bytes of somebody else in the place of a document (Target.corrupt)",
    "processes": "open the same data from another process (Target.recipe)",
    "network": "route connections through the kit's proxy (Target.address)",
    "pause": "stop the server's process and let it go on (Target.server)",
    "restart": "kill the server's process and start it again, with its data (Target.server)",
    "empty_restart": "kill the server's process and start it again without data (Target.server)",
    "real_time": "let its clock go on with this machine's (Target.real_time)",
    "torchrun": "meet under torchrun by a registered name (Target.torchrun_arguments)",
}
"""What a clause may do to the server or to the way to it; the text ends "it takes a way to"."""


class Server(ABC):
    """A server that the kit may torment. Every method returns when what it does has happened."""

    technology: str = ""
    """A name for reports, for instance ``redis``."""
    version: str = "unknown"
    """What the server says of itself."""

    @property
    @abstractmethod
    def address(self) -> tuple[str, int]:
        """Host and port; the same after a restart."""

    def cannot(self, control: str) -> str:
        """Why it is not to be paused or restarted (see ``CONTROLS``); "" where it is."""
        return ""

    @abstractmethod
    def pause(self) -> None:
        """Stop it without its knowledge: connections stay, nothing answers."""

    @abstractmethod
    def resume(self) -> None:
        """Let a paused server go on."""

    @abstractmethod
    def kill(self) -> None:
        """End it without warning, as a crash does."""

    @abstractmethod
    def restart(self, *, keep_data: bool) -> None:
        """Start it again after :meth:`kill` and return when it answers."""


class Target(ABC):
    """What is under test."""

    name: str = ""
    """For reports; by default that of the class."""
    endpoint: str = ""
    """For reports, with secrets masked."""
    without: Mapping[str, str] = MappingProxyType({})
    """Capabilities that it has not, each with the reason."""
    short_ttl_seconds: float = 1.0
    """An entry that a clause waits to see expire: short, but longer than a few calls take."""
    call_seconds_max: float = 15.0
    """Within so many seconds every call returns or raises, whatever happens to the server, beyond
    the time that the call itself was told to wait."""
    real_time: bool = True
    """Whether its clock is one that goes on by itself, as handlers need it; False where only
    :meth:`let_pass` moves it."""
    recovery_seconds_max: float = 15.0
    """So long after the server is back calls may still fail."""
    runs_on: str = ""
    """What is behind it, with the version that it gives itself; by default the server's."""
    server: Server | None = None
    """The server process, where the kit may stop and kill it."""
    address: tuple[str, int] | None = None
    """Host and port that :meth:`connect` and :meth:`store` connect to from now on. The kit puts a
    proxy's address here. None where there is no network between."""

    @abstractmethod
    def connect(self, run_id: str = "job") -> Any:
        """Another ``RendezvousBackend`` on the same data; the target closes it in the end."""

    def store(self, run_id: str = "job") -> Store:
        """Another store on the same data, with no key in it when the clause begins; the target
        closes it in the end."""
        raise NotImplementedError(f"{type(self).__name__} has no store")

    def wipe(self) -> None:
        """Lose everything, as a server does that restarts without its data. What is connected
        may answer the next call with ``RendezvousConnectionError``, but not the one after it."""
        raise NotImplementedError(f"{type(self).__name__} has no wipe()")

    def corrupt(self, run_id: str = "job") -> None:
        """Put something that this backend has not written where the run's document is."""
        raise NotImplementedError(f"{type(self).__name__} has no corrupt()")

    def let_pass(self, seconds: float) -> None:
        """Let the backend's clock go on by so much."""
        threading.Event().wait(seconds)

    @abstractmethod
    def close(self) -> None:
        """Close what was opened; may be called more than once."""

    def recipe(self) -> tuple[str, dict[str, Any]] | None:
        """``module:function`` and keyword arguments, plain enough for JSON, with which another
        process makes a target on the same data; None where that cannot be."""
        return None

    def torchrun_arguments(self, run_id: str) -> list[str] | None:
        """``--rdzv-backend=…``, ``--rdzv-endpoint=…`` and what else torchrun needs to meet here;
        None where no name is registered."""
        return None

    def cannot(self, control: str) -> str:
        """Why the kit cannot do this to it; "" where it can."""
        if control in ("pause", "restart", "empty_restart") and self.server is not None:
            return self.server.cannot(control)
        able = {
            "wipe": type(self).wipe is not Target.wipe,
            "store": type(self).store is not Target.store,
            "corrupt": type(self).corrupt is not Target.corrupt,
            "processes": self.recipe() is not None,
            "network": self.address is not None,
            "pause": self.server is not None,
            "restart": self.server is not None,
            "empty_restart": self.server is not None,
            "real_time": self.real_time,
            "torchrun": self.torchrun_arguments("probe") is not None,
        }
        return "" if able[control] else f"it takes a way to {CONTROLS[control]}"

    def until(self, condition: Callable[[], object]) -> None:
        """Let time pass until the condition holds."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            self.let_pass(self.short_ttl_seconds / 10)
