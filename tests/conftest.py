"""Stops a run that would not test the files of this checkout, with the sentence that helps.

The package is installed editable and strict (see setup.cfg): as a tree of links, made at install
time. So a new file is not importable before the package is linked again, and a test of it would
fail with a riddle. An installed wheel has no such trouble and is left alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
RESOLVER = "timeout:1 attempts:1"
"""Seconds. torch looks up the name of each address that it connects to, in vain for most, and a
name server that leaves such a question unanswered holds each test up for 10 s; nobody can break it
off, and torch counts it to the time that it has to connect. Children inherit it."""
RELINK = "python -m pip install --no-deps --no-build-isolation --editable ."


def pytest_configure() -> None:
    # Before this process resolves its first name: the resolver reads it once.
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
    problem = find_problem()
    if problem:
        raise pytest.UsageError(problem)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keep ``--doctest-modules`` from importing the programs that lie beside the tests."""
    program = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if program else None


def find_problem() -> str:
    spec = importlib.util.find_spec("rdzv")
    if spec is None or spec.origin is None:
        return f"rdzv is not installed in {sys.executable}. Run `make venv`, or here: {RELINK}"
    installed = Path(spec.origin).parent
    if installed.parent.name in ("site-packages", "dist-packages"):
        return ""
    with (ROOT / "pyproject.toml").open("rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    folders = {name: ROOT / folder for name, folder in setuptools["package-dir"].items()}
    if not (installed / "__init__.py").samefile(folders["rdzv"] / "__init__.py"):
        return f"rdzv is imported from {installed}, which is not this checkout. Here: {RELINK}"
    missing = [
        path.relative_to(ROOT).as_posix()
        for name, folder in folders.items()
        for pattern in ("**/*.py", *setuptools["package-data"].get(name, ()))
        for path in sorted(folder.glob(pattern))
        if not (installed.joinpath(*name.split(".")[1:]) / path.relative_to(folder)).exists()
    ]
    if missing:
        return f"Not importable yet: {', '.join(missing)}. Run `make venv`, or: {RELINK}"
    return ""
