"""Servers in containers, by testcontainers.

Rules:

* What can be decided is decided quickly: an engine that does not answer within
  :data:`ENGINE_SECONDS_MAX` is none, and so is a registry.
* A container keeps its port when it is killed and started: the port is chosen here, not by the
  engine. It is published where this process reaches it, and no further.
* The guardian removes containers of a process that died; testcontainers' own Ryuk does so as well
  where its image is there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

from rdzv.conformance.servers.base import (
    RealServer,
    ServerFailed,
    ServerUnavailable,
    driver,
    wait_for_answer,
)
from rdzv.conformance.servers.guardian import GUARDIAN
from rdzv.conformance.servers.local import ATTEMPTS_MAX, free_port
from rdzv.conformance.servers.technologies import Technology

ENGINE_SECONDS_MAX = 2.0
END_SECONDS_MAX = 30.0
LOG_LINES = 15
DEFAULT_HOST = "unix:///var/run/docker.sock"
SETTINGS = (".docker/config.json", ".testcontainers.properties")
"""Below the home folder; they may name an engine elsewhere."""


def why_no_engine() -> str:
    """Why it is not worth asking, found without importing Docker's client where no setting names
    an engine; "" where it is."""
    host = os.environ.get("DOCKER_HOST", "")
    if not host and any((Path.home() / name).exists() for name in SETTINGS):
        host = driver("testcontainers.core.docker_client", "dev").get_docker_host() or ""
    path = (host or DEFAULT_HOST).partition("unix://")[2]
    if not path:
        return ""
    # Docker's client leaks its socket where this fails.
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(ENGINE_SECONDS_MAX)
        try:
            one.connect(path)
        except OSError as error:
            return f"no Docker engine answers: {error.strerror or error}: {path}"
    return ""


class Engine:
    """A Docker engine that answers. Raises :class:`ServerUnavailable` where none does."""

    def __init__(self) -> None:
        reason = why_no_engine()
        if reason:
            raise ServerUnavailable(reason)
        self._docker = driver("docker", "dev")
        self._config = driver("testcontainers.core.config", "dev").testcontainers_config
        connect = driver("testcontainers.core.docker_client", "dev").DockerClient
        # With a version given this asks nothing yet: where no engine answers, a client that asked
        # for the version while it is made could not be closed.
        self._client: Any = connect(version="1.44", timeout=ENGINE_SECONDS_MAX).client
        try:
            self.version = str(self._client.api.version(api_version=False)["Version"])
            self._client.close()
            self._client = connect(timeout=ENGINE_SECONDS_MAX).client
        except (self._docker.errors.DockerException, OSError) as error:
            self.close()
            raise ServerUnavailable(f"no Docker engine answers: {_brief(error)}") from error
        self._no_registry = ""
        if not self._has(self._config.ryuk_image):
            self._config.ryuk_disabled = True

    def reason_against(self, image: str) -> str:
        """Why the image can neither be used nor pulled; "" where it can."""
        image = self._config.hub_image_name_prefix + image
        if self._has(image):
            return ""
        if not self._no_registry:
            try:
                self._client.images.get_registry_data(image)
                return ""
            except self._docker.errors.NotFound:
                return f"no registry has the image {image}"
            except (self._docker.errors.DockerException, OSError) as error:
                # One answer for all: each further question would take as long.
                self._no_registry = _brief(error)
        return f"the image {image} is not there and cannot be pulled: {self._no_registry}"

    def is_there(self, image: str) -> bool:
        return self._has(self._config.hub_image_name_prefix + image)

    def _has(self, image: str) -> bool:
        try:
            self._client.images.get(image)
        except self._docker.errors.ImageNotFound:
            return False
        except (self._docker.errors.DockerException, OSError) as error:
            raise ServerUnavailable(f"the Docker engine fails: {_brief(error)}") from error
        return True

    def close(self) -> None:
        self._client.close()


class ContainerServer(RealServer):
    """A container. Starts when it is made, after its image was pulled if need be; returns when it
    answers."""

    def __init__(self, technology: Technology, image: str) -> None:
        self._technology = technology
        self.technology = technology.name
        self._image = image
        self._owner = os.getpid()
        self._api_error = driver("docker.errors", "dev").APIError
        self._container: Any = None
        self._host = ""
        try:
            self._start_somewhere()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        return self._host, self._port

    def endpoint(self, address: tuple[str, int] | None = None) -> str:
        return self._technology.endpoint(*(address or self.address))

    def pause(self) -> None:
        self._inner.pause()

    def resume(self) -> None:
        self._inner.unpause()

    def kill(self) -> None:
        self._inner.reload()
        if self._inner.status == "paused":
            # An engine takes no signal for a paused container, or holds it back.
            self._inner.unpause()
        with contextlib.suppress(self._api_error):  # it is dead already; wait() finds out
            self._inner.kill()
        self._inner.wait(timeout=END_SECONDS_MAX)

    def restart(self, *, keep_data: bool) -> None:
        self.kill()
        if keep_data:
            self._inner.start()
        else:
            self._remove()
            self._create()
        self._wait()

    def close(self) -> None:
        if os.getpid() == self._owner and self._container is not None:
            self._remove()

    @property
    def _inner(self) -> Any:
        return self._container.get_wrapped_container()

    def _start_somewhere(self) -> None:
        # Another program may take a port between the look and the start.
        for attempt in range(ATTEMPTS_MAX):
            self._port = free_port()
            try:
                self._create()
                return self._wait()
            except self._api_error as error:
                self.close()
                if "port is already allocated" not in str(error) or attempt == ATTEMPTS_MAX - 1:
                    raise ServerFailed(f"{self._image} does not start: {error}") from error

    def _create(self) -> None:
        container = driver("testcontainers.core.container", "dev").DockerContainer(self._image)
        self._container = container
        container.with_envs(**self._technology.image_environment)
        container.with_command(list(self._technology.image_command))
        publish, self._host = _places(container.get_docker_client())
        container.ports[f"{self._technology.port}/tcp"] = (publish, self._port)
        container.start()
        host = os.environ.get("DOCKER_HOST", "")
        GUARDIAN.watch(self._inner.id, container=self._inner.id, host=host)

    def _remove(self) -> None:
        container, self._container = self._container, None
        try:
            inner = container.get_wrapped_container()
        except driver("testcontainers.core.exceptions", "dev").ContainerStartException:
            container.stop()  # closes its connections to the engine
            return
        inner.reload()
        if inner.status == "paused":
            inner.unpause()
        container.stop()
        GUARDIAN.forget(inner.id)

    def _wait(self) -> None:
        self.technology, self.version = wait_for_answer(
            lambda: self._technology.ask(self.endpoint()),
            self._ended,
            lambda: str(self._inner.logs(tail=LOG_LINES).decode(errors="replace")),
        )

    def _ended(self) -> str:
        self._inner.reload()
        if self._inner.status not in ("exited", "dead"):
            return ""
        return f"a container of {self._image} ended with {self._inner.attrs['State']['ExitCode']}"


def _places(client: Any) -> tuple[str, str]:
    """Where to publish a port, and where this process then finds it."""
    host = str(client.host())
    if host not in ("localhost", "127.0.0.1"):
        return "0.0.0.0", host
    mode = client.get_connection_mode()
    if mode.value == "docker_host":
        return "127.0.0.1", "127.0.0.1"
    # This process may be in a container itself: then the engine's host is the gateway.
    bridge = client.client.networks.get("bridge")
    config = bridge.attrs["IPAM"]["Config"][0]
    # Engines that have run no container yet leave it out; it is the first address by default.
    first = next(ipaddress.ip_network(config["Subnet"]).hosts())
    gateway = str(config.get("Gateway") or first)
    return gateway, gateway


def _brief(error: Exception) -> str:
    lines = str(getattr(error, "explanation", None) or error).strip().splitlines()
    return (lines[-1] if lines else type(error).__name__)[:200]
