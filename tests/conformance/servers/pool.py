"""Which server each technology gets, and why; the servers of one run.

Rules:

* Chosen once for each technology and run, without starting anything; started when first asked for.
* What cannot be had is said with how to get it, and remembered: nothing vanishes in silence.
* A server that can be had and fails is an error (``ServerFailed``), never a reason to skip.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from rdzv.conformance.servers.base import (
    RealServer,
    ServerFailed,
    ServerUnavailable,
    masked,
)
from rdzv.conformance.servers.containers import ContainerServer, Engine
from rdzv.conformance.servers.local import LocalServer
from rdzv.conformance.servers.options import TECHNOLOGIES, Options, options_of
from rdzv.conformance.servers.remote import RemoteServer
from rdzv.conformance.servers.technologies import ALL, Technology

__all__ = ["RealServer", "ServerFailed", "ServerPool", "ServerUnavailable"]


@dataclass(frozen=True, slots=True)
class Way:
    """How a technology is had."""

    kind: str
    """``docker``, ``local`` or ``url``."""
    what: str
    """The program, image or URL, with the version where that is known before it runs."""
    why: str
    start: Callable[[], RealServer]


class ServerPool:
    """The servers of one run of pytest; close it at the end.

    ``say`` is told what takes long, in a line.
    """

    def __init__(
        self, config: pytest.Config | Options, say: Callable[[str], None] | None = None
    ) -> None:
        self.options = config if isinstance(config, Options) else options_of(config)
        self._say = say or (lambda line: None)
        self._ways: dict[str, Way | ServerUnavailable] = {}
        self._servers: dict[str, RealServer | Exception] = {}
        self._engine: Engine | ServerUnavailable | None = None

    def get(self, technology: str) -> RealServer:
        """The technology's server, the same one for the whole run; it answers when this returns.
        One that a failed test has left dead starts anew, without data.

        Raises :class:`ServerUnavailable` with how to get it, and :class:`ServerFailed` when it
        could be had but does not run; both again at every further call.
        """
        if technology not in self._servers:
            atexit.register(self.close)
            try:
                self._servers[technology] = self._way(technology).start()
            except (ServerUnavailable, ServerFailed) as error:
                self._servers[technology] = error
        server = self._servers[technology]
        if isinstance(server, Exception):
            raise server.with_traceback(None)
        if not server.runs():
            server.restart(keep_data=False)
        return server

    def header(self) -> list[str]:
        """A line for each technology: how it is had, its version, and why so."""
        lines: dict[str, str] = {}
        reasons: dict[str, str] = {}
        for name in TECHNOLOGIES:
            try:
                way = self._way(name)
            except ServerUnavailable as error:
                lines[name] = f"NONE: {error}"
                continue
            server = self._servers.get(name)
            said = (
                f"{server.technology} {server.version}, " if isinstance(server, RealServer) else ""
            )
            lines[name], reasons[name] = f"{way.kind}, {said}{way.what}", way.why
        same = len(set(reasons.values())) == 1
        texts = [
            f"server {name}: {line}"
            + ("" if same or name not in reasons else f" ({reasons[name]})")
            for name, line in lines.items()
        ]
        return [*texts, f"servers so because: {next(iter(reasons.values()))}"] if same else texts

    def unavailable(self) -> dict[str, str]:
        """What was asked for, or is required, and could not be had: why, and how to get it."""
        reasons = {}
        for name in TECHNOLOGIES:
            failed = self._servers.get(name)
            if name in self.options.required and failed is None:
                try:
                    self._way(name)
                except ServerUnavailable as error:
                    failed = error
            if isinstance(failed, Exception):
                reasons[name] = str(failed)
        return reasons

    def missing(self) -> list[str]:
        """A sentence for each technology that is required and could not be had: for each of them
        the run has failed."""
        return [
            f"the run, since {name} is required (--rdzv-require) and could not be had: {reason}"
            for name, reason in self.unavailable().items()
            if name in self.options.required
        ]

    def close(self) -> None:
        """End all servers; may be called more than once."""
        atexit.unregister(self.close)
        servers, self._servers = self._servers, {}
        for server in servers.values():
            if isinstance(server, RealServer):
                server.close()
        if isinstance(self._engine, Engine):
            self._engine.close()
        self._engine = None

    def _way(self, name: str) -> Way:
        if name not in self._ways:
            try:
                self._ways[name] = self._choose(ALL[name])
            except ServerUnavailable as error:
                self._ways[name] = error
        way = self._ways[name]
        if isinstance(way, ServerUnavailable):
            raise way.with_traceback(None)
        return way

    def _choose(self, technology: Technology) -> Way:
        name, mode = technology.name, self.options.mode
        url = self.options.urls.get(name)
        if url is not None:
            return Way("url", masked(url), "as asked", lambda: RemoteServer(technology, url))
        if mode == "local":
            return self._local(technology, "as asked")
        try:
            return self._docker(technology)
        except ServerUnavailable as error:
            if mode == "docker":
                raise
            why = str(error)
        try:
            return self._local(technology, why)
        except ServerUnavailable as error:
            raise ServerUnavailable(f"{error}; {why}") from error

    def _docker(self, technology: Technology) -> Way:
        image = self.options.images[technology.name]
        engine = self._docker_engine()
        reason = engine.reason_against(image)
        if reason:
            raise ServerUnavailable(reason)
        there = engine.is_there(image)

        def start() -> RealServer:
            if not there:
                self._say(f"pulling {image}")
            return ContainerServer(technology, image)

        what = f"image {image}" if there else f"image {image}, which is pulled first"
        return Way("docker", what, f"Docker engine {engine.version} answers", start)

    def _docker_engine(self) -> Engine:
        if self._engine is None:
            try:
                self._engine = Engine()
            except ServerUnavailable as error:
                self._engine = error
        if isinstance(self._engine, ServerUnavailable):
            raise self._engine.with_traceback(None)
        return self._engine

    def _local(self, technology: Technology, why: str) -> Way:
        program = technology.find()
        if program is None:
            raise ServerUnavailable(f"no program for it on this machine: {technology.how}")
        what = f"{program.path.name} {program.version()} {program.origin}"
        return Way("local", what, why, lambda: LocalServer(technology, program))
