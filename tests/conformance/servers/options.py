"""The command line of the servers: options, and what they mean.

Rule: the pytest plug-in imports this in every run, so it imports no driver, no torch, no Docker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

TECHNOLOGIES = ("redis", "valkey", "postgresql", "mysql", "etcd")
MODES = ("auto", "docker", "local")
IMAGES = {
    "redis": "redis:7",
    "valkey": "valkey/valkey:8",
    "postgresql": "postgres:16",
    "mysql": "mariadb:11",
    "etcd": "quay.io/coreos/etcd:v3.5.1",
}
IMAGE_VARIABLE = "RDZV_IMAGE_"
"""With a technology's name in capitals: the environment's way to name its image."""

# A comma parts two choices only where a choice begins: URLs with several hosts have commas too.
_NEXT_CHOICE = re.compile(rf",(?=(?:{'|'.join(TECHNOLOGIES)})=|(?:{'|'.join(MODES)})(?:,|$))")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user wants."""

    mode: str = "auto"
    """How to get the technologies that have no URL: ``auto``, ``docker`` or ``local``."""
    urls: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=lambda: dict(IMAGES))
    required: tuple[str, ...] = ()
    given: bool = False
    """Whether the user, or the project's configuration, spoke of servers at all."""


def add_options(group: pytest.OptionGroup) -> None:
    """Add the options of :func:`options_of` to the group."""
    group.addoption(
        "--rdzv-servers",
        metavar="auto|docker|local|TECHNOLOGY=URL,...",
        help="where test servers come from: containers, binaries of this machine (PATH, Debian's "
        "folders, wheels), or servers of yours; auto (default): containers where a Docker engine "
        "answers and has or gets the image, else binaries. Technologies: "
        + ", ".join(TECHNOLOGIES),
    )
    group.addoption(
        "--rdzv-image",
        metavar="TECHNOLOGY=IMAGE",
        action="append",
        default=[],
        help=f"another image for the container; or {IMAGE_VARIABLE}REDIS and so on in the "
        "environment; may be given several times",
    )
    group.addoption(
        "--rdzv-require",
        metavar="TECHNOLOGY,...",
        default="",
        help="technologies without which the run fails, instead of leaving their tests out",
    )


def options_of(config: pytest.Config) -> Options:
    """What was asked. Raises ``pytest.UsageError`` for what cannot be understood."""
    servers = config.getoption("--rdzv-servers", default=None)
    required = config.getoption("--rdzv-require", default=None) or ""
    mode, urls = read_servers(servers or "auto")
    return Options(
        mode=mode,
        urls=urls,
        images=read_images(config.getoption("--rdzv-image", default=None) or [], os.environ),
        required=tuple(
            _known("--rdzv-require", name.strip()) for name in required.split(",") if name.strip()
        ),
        given=bool(servers or required),
    )


def read_servers(text: str) -> tuple[str, dict[str, str]]:
    """The mode, and the URLs by technology.

    >>> read_servers("local,redis=redis://a:1,etcd=b:2,c:3")
    ('local', {'redis': 'redis://a:1', 'etcd': 'b:2,c:3'})
    """
    mode, urls = "", {}
    for choice in _NEXT_CHOICE.split(text):
        name, separator, url = choice.strip().partition("=")
        if separator and url:
            urls[_known("--rdzv-servers", name)] = url
        elif separator or name not in MODES:
            raise pytest.UsageError(
                f"--rdzv-servers: {choice!r} is none of {', '.join(MODES)}, TECHNOLOGY=URL"
            )
        elif mode not in ("", name):
            raise pytest.UsageError(f"--rdzv-servers: either {mode} or {name}")
        else:
            mode = name
    return mode or "auto", urls


def read_images(texts: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The image of each technology: the option's, else the environment's, else the default.

    >>> read_images(["redis=redis:8"], {"RDZV_IMAGE_REDIS": "x", "RDZV_IMAGE_ETCD": "y"})["redis"]
    'redis:8'
    """
    images = {
        name: environment.get(f"{IMAGE_VARIABLE}{name.upper()}") or image
        for name, image in IMAGES.items()
    }
    for text in texts:
        name, _, image = text.partition("=")
        if not image:
            raise pytest.UsageError(f"--rdzv-image: {text!r} is not of the form TECHNOLOGY=IMAGE")
        images[_known("--rdzv-image", name)] = image
    return images


def _known(option: str, name: str) -> str:
    if name not in TECHNOLOGIES:
        raise pytest.UsageError(
            f"{option}: {name!r} is no technology; there are: {', '.join(TECHNOLOGIES)}"
        )
    return name
