"""What rdzv costs every process that imports torch's rendezvous, and what torchrun finds there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

IMPORT_MILLISECONDS_MAX = 5.0
RUNS_MAX = 5
"""A busy machine only adds to the time, so one quick run is enough."""
NAMES = ("redis", "sql", "postgresql", "mysql", "sqlite", "etcd-v3", "tcpstore", "filestore")
NOT_FOR_EVERYBODY = (
    *("sqlalchemy", "redis", "hiredis", "psycopg", "pymysql", "pyetcd", "grpc", "rich"),
    *("rdzv.handler", "rdzv.registry", "rdzv.settings", "rdzv.errors", "rdzv.backends"),
)


def report(program: str, directory: Path) -> Any:
    # In an empty directory: Python looks for packages and their metadata in the current one too.
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(run.stdout.splitlines()[-1])


def test_import_takes_no_time(tmp_path: Path) -> None:
    """All that torch does with our entry points, our own imports included. (``-X importtime``
    does not see what is imported by ``importlib``, as entry points are.)"""
    program = """
import importlib.metadata, json, time
spent, original = [], importlib.metadata.EntryPoint.load

def load(entry):
    began = time.perf_counter()
    function = original(entry)
    creator = function()
    if entry.module.startswith("rdzv."):
        spent.append(time.perf_counter() - began)
    return lambda: creator

importlib.metadata.EntryPoint.load = load
import torch.distributed.elastic.rendezvous
print(json.dumps([len(spent), sum(spent) * 1000]))
"""
    for _ in range(RUNS_MAX):
        loaded, milliseconds = report(program, tmp_path)
        assert loaded == len(NAMES)
        if milliseconds < IMPORT_MILLISECONDS_MAX:
            return
    pytest.fail(f"rdzv adds {milliseconds:.1f} ms to the import of torch's rendezvous")


def test_import_brings_in_no_driver(tmp_path: Path) -> None:
    program = f"""
import json, sys
import torch.distributed.elastic.rendezvous
from importlib.metadata import entry_points
for entry in entry_points(group="torchrun.handlers"):
    entry.load()()
names = {NOT_FOR_EVERYBODY!r}
print(json.dumps([[name for name in names if name in sys.modules], "rdzv.torchrun" in sys.modules]))
"""
    assert report(program, tmp_path) == [[], True]


def test_torchs_registry_knows_all_names_and_keeps_its_own(tmp_path: Path) -> None:
    program = """
import json
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
creators = rendezvous_handler_registry._registry
print(json.dumps({name: creator.__module__ for name, creator in creators.items()}))
"""
    modules = report(program, tmp_path)
    for name in NAMES:
        assert modules[name] == "rdzv.torchrun", name
    for name in ("c10d", "etcd", "etcd-v2", "static"):
        assert modules[name] == "torch.distributed.elastic.rendezvous.registry", name


def test_torchrun_makes_a_handler_by_name(tmp_path: Path) -> None:
    program = f"""
import json
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
made = {{}}
for name, endpoint in (
    ("sqlite", "{tmp_path}/a.db"), ("sql", "sqlite:///{tmp_path}/b.db"),
    ("filestore", "{tmp_path}/c"),
):
    params = RendezvousParameters(name, endpoint, "job", 1, 1, "127.0.0.1", timeout=900)
    handler = get_rendezvous_handler(params)
    made[name] = [type(handler).__module__, handler.get_backend()]
    handler.shutdown()
print(json.dumps(made))
"""
    made = report(program, tmp_path)
    assert made["sqlite"] == ["rdzv.handler", "sqlite"]
    assert made["sql"] == ["rdzv.handler", "sql"]
    assert made["filestore"] == ["rdzv.handler", "filestore"]
