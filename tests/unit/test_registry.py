"""From a name to a handler: see rdzv.registry and rdzv.torchrun.

Third parties are real ones: packages with metadata, in a folder on ``sys.path``.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandlerRegistry, RendezvousParameters

from rdzv import torchrun
from rdzv.errors import RendezvousConnectionError, RendezvousError, RendezvousSettingsError
from rdzv.registry import create, known_backends, open_backend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAMES = {"redis", "sql", "postgresql", "mysql", "sqlite", "etcd-v3", "tcpstore", "filestore"}

MEMORY = """
import torch.distributed as dist
from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.ports import Closable

closed = []
seen = []

class Backend(MemoryBackend, Closable):
    def close(self):
        closed.append(self)

def create_backend(params):
    seen.append(params)
    return Backend(MemorySpace(), params.run_id), dist.HashStore()
"""

READY = """
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import GetsReady

ready = []

class Ready(Backend, GetsReady):
    def get_ready(self):
        if seen[-1].endpoint == "away":
            raise RendezvousConnectionError("away")
        ready.append(self)

def create_backend(params):
    seen.append(params)
    return Ready(MemorySpace(), params.run_id), dist.HashStore()
"""

Install = Callable[..., str]
_numbers = itertools.count()
"""Of modules: what was imported once stays imported."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a package of one module with one entry point; returns the module's name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(backend: str, source: str, function: str = "create_backend") -> str:
        module = f"thirdparty_{next(_numbers)}"
        (tmp_path / f"{module}.py").write_text(source)
        information = tmp_path / f"{module}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\n")
        (information / "entry_points.txt").write_text(
            f"[rdzv.backends]\n{backend} = {module}:{function}\n"
        )
        importlib.invalidate_caches()
        return module

    return make


def parameters(backend: str, endpoint: str = "", **options: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, "job", 1, 2, "127.0.0.1", **options)


def module_of(name: str) -> Any:
    return importlib.import_module(name)


def test_all_promised_names_are_known() -> None:
    known = {one.name: one for one in known_backends()}
    assert set(known) >= NAMES
    assert all(known[name].factory for name in NAMES)
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    assert {extra for one in known.values() for extra in one.extras} <= extras
    assert known["sqlite"].factory == "rdzv.stores.sql:create_backend"


def test_a_name_that_the_installation_does_not_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.registry._entry_points", dict)
    with pytest.raises(RendezvousSettingsError, match="--rdzv-backend=redis is not registered"):
        create(parameters("redis"))


@pytest.mark.parametrize(
    ("name", "nearest"), [("sqlight", "sqlite"), ("Redis", "redis"), ("etcd_v3", "etcd-v3")]
)
def test_an_unknown_name_gets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(RendezvousSettingsError, match=f"Did you mean {nearest}"):
        create(parameters(name))


@pytest.mark.parametrize("name", ["c10d", "etcd", "etcd-v2", "static"])
def test_a_name_of_torchs_is_not_offered_for_itself(name: str) -> None:
    with pytest.raises(RendezvousSettingsError, match=f"{name} is torch's own") as caught:
        create(parameters(name))
    assert "Did you mean" not in str(caught.value)


def test_a_name_like_no_other() -> None:
    with pytest.raises(RendezvousSettingsError) as caught:
        create(parameters("zzzzzz"))
    assert "Did you mean" not in str(caught.value)
    assert "sqlite" in str(caught.value)


def test_sql_takes_an_sqlite_url(tmp_path: Path) -> None:
    backend, store = open_backend(parameters("sql", f"sqlite:///{tmp_path}/job.db"))
    assert backend.name == "sql"
    assert isinstance(store, dist.Store)


def test_sql_says_which_dialects_work() -> None:
    with pytest.raises(RendezvousSettingsError, match="sqlite") as caught:
        open_backend(parameters("sql", "oracle://user:hunter22@host/db"))
    assert "hunter22" not in str(caught.value)


def test_a_handler_through_torchs_registry(install: Install) -> None:
    install("acme", MEMORY)
    registry = RendezvousHandlerRegistry()
    registry.register("acme", torchrun.handler_for("acme"))
    registry.register("acme", torchrun.handler_for("acme"))
    handler = registry.create_handler(parameters("acme"))
    assert handler.get_backend() == "acme"
    assert handler.get_run_id() == "job"
    handler.shutdown()


def test_a_third_party_is_known_and_may_be_registered_under_another_name(install: Install) -> None:
    module = install("acme", MEMORY)
    assert {one.name: one.factory for one in known_backends()}["acme"] == f"{module}:create_backend"
    handler = torchrun.handler_for("acme")(parameters("acme-of-torchrun"))
    assert handler.get_backend() == "acme-of-torchrun"
    handler.shutdown()


def test_the_factory_sees_what_the_environment_holds(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install("acme", MEMORY)
    monkeypatch.setenv("ACME_ENDPOINT", "acme://u:hunter22@h")
    params = parameters("acme", "env:ACME_ENDPOINT")
    open_backend(params)
    assert module_of(module).seen[0].endpoint == "acme://u:hunter22@h"
    assert params.endpoint == "env:ACME_ENDPOINT"


def test_what_was_opened_is_closed_when_the_handler_cannot_be_made(install: Install) -> None:
    module = install("acme", MEMORY)
    params = parameters("acme")
    params.local_addr = "203.0.113.254"
    with pytest.raises(RendezvousSettingsError, match="--local-addr"):
        create(params)
    assert len(module_of(module).closed) == 1


def test_a_handler_has_its_backend_get_ready(install: Install) -> None:
    module = install("acme", MEMORY + READY)
    params = parameters("acme")
    open_backend(params)
    assert module_of(module).ready == []
    create(params).shutdown()
    assert len(module_of(module).ready) == 1


def test_what_was_opened_is_closed_when_it_cannot_get_ready(install: Install) -> None:
    module = install("acme", MEMORY + READY)
    with pytest.raises(RendezvousConnectionError, match="away"):
        create(parameters("acme", "away"))
    assert len(module_of(module).closed) == 1


def test_options_are_checked_before_anything_is_opened(install: Install) -> None:
    module = install("acme", MEMORY)
    with pytest.raises(RendezvousSettingsError, match="join_timeout"):
        create(parameters("acme", join_timeout="0"))
    assert module_of(module).seen == []


def test_a_backend_names_its_own_options(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("acme", f"{MEMORY}\nEXTRA_OPTIONS = frozenset({{'acme_zone'}})\n")
    create(parameters("acme", acme_zone="a", acme_zoned="b")).shutdown()
    told = [record.getMessage() for record in caplog.records if "option" in record.getMessage()]
    assert told == [
        "Unknown option acme_zoned in --rdzv-conf is ignored. Did you mean acme_zone?",
    ]


@pytest.mark.parametrize(
    ("returned", "kinds"),
    [
        ("None", "NoneType"),
        ("(1, 2)", "int, int"),
        ("(dist.HashStore(), Backend(MemorySpace(), 'job'))", "HashStore, Backend"),
        ("(Backend(MemorySpace(), 'job'),)", "Backend"),
        ("(Backend(MemorySpace(), 'job'), None)", "Backend, NoneType"),
    ],
)
def test_a_factory_that_returns_something_else(install: Install, returned: str, kinds: str) -> None:
    module = install("acme", f"{MEMORY}\ndef wrong(params):\n    return {returned}\n", "wrong")
    with pytest.raises(RendezvousError) as caught:
        create(parameters("acme"))
    assert f"{module}:wrong" in str(caught.value)
    assert f"returned {kinds} instead" in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "driver", "extra"),
    [
        ("redis", "redis", "redis"),
        ("postgresql", "psycopg", "postgresql"),
        ("mysql", "pymysql", "mysql"),
        ("etcd-v3", "grpc", "etcd"),
        ("etcd-v3", "pyetcd", "etcd"),
        ("etcd-v3", "google.protobuf", "etcd"),
    ],
)
def test_our_own_backends_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, backend: str, driver: str, extra: str
) -> None:
    for name in list(sys.modules):
        if name.startswith((f"rdzv.backends.{extra}", f"rdzv.stores.{extra}", "pyetcd")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(RendezvousSettingsError, match=rf"pip install 'rdzv\[{extra}\]'"):
        create(parameters(backend, "127.0.0.1:1"))


@pytest.mark.parametrize(
    "error",
    [
        "ModuleNotFoundError('No module named thirdparty.x', name='thirdparty.x')",
        "ModuleNotFoundError('nameless')",
        "ModuleNotFoundError('another driver', name='psycopg')",
        "ImportError('no pq wrapper', name='pymysql')",
        "AttributeError('a bug')",
    ],
)
def test_no_other_error_of_a_package_is_hidden(install: Install, error: str) -> None:
    install("acme", f"raise {error}\n")
    with pytest.raises((ImportError, AttributeError)) as caught:
        create(parameters("acme"))
    assert repr(caught.value) == repr(eval(error))
    assert caught.value.__cause__ is None


def test_our_own_backend_wins_over_a_third_partys(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = install("sqlite", MEMORY)
    backend, _ = open_backend(parameters("sqlite", str(tmp_path / "job.db")))
    assert type(backend).__module__.startswith("rdzv.backends.sql")
    assert re.search(rf"rdzv.stores.sql:create_backend is used, {module}:.* is not", caplog.text)


def test_creators_are_one_object_a_name() -> None:
    assert torchrun.sqlite() is torchrun.handler_for("sqlite")
    functions = {name: getattr(torchrun, name.replace("-", "_")) for name in NAMES}
    assert {name: function() for name, function in functions.items()} == {
        name: torchrun.handler_for(name) for name in NAMES
    }
    assert len({function() for function in functions.values()}) == len(NAMES)
