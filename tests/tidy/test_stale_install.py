"""tests/conftest.py stops a run that would not test this checkout: tried on small ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
PROJECT = """
[tool.setuptools.package-dir]
"rdzv" = "handler"
"rdzv.backends" = "backends"
[tool.setuptools.package-data]
"rdzv.backends" = ["lua/*.lua"]
"""
FILES = {
    "handler/__init__.py": "rdzv/__init__.py",
    "handler/ports.py": "rdzv/ports.py",
    "backends/__init__.py": "rdzv/backends/__init__.py",
    "backends/sql/rows.py": "rdzv/backends/sql/rows.py",
    "backends/lua/beat.lua": "rdzv/backends/lua/beat.lua",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose one test passes, and beside it the tree of links that imports it."""
    root = tmp_path / "checkout"
    for name, link in FILES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        target = root / "build" / "links" / link
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(file)
    (root / "tests").mkdir()
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "tests" / "test_one.py").write_text("def test_one():\n    import rdzv\n")
    shutil.copy(CONFTEST, root / "tests")
    return root


def run_pytest(checkout: Path, import_from: Path) -> subprocess.CompletedProcess[str]:
    # Not the real package's plug-in: what it needs is not in this checkout.
    plugins = ["-p", "no:cacheprovider", "-p", "no:rdzv-conformance"]
    command = [sys.executable, "-m", "pytest", *plugins, "tests"]
    environment = {**os.environ, "PYTHONPATH": str(import_from)}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def test_a_complete_tree_of_links_runs(checkout: Path) -> None:
    run = run_pytest(checkout, checkout / "build" / "links")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout


@pytest.mark.parametrize(
    "missing", ["handler/ports.py", "backends/sql/rows.py", "backends/lua/beat.lua"]
)
def test_a_file_without_a_link_stops_the_run(checkout: Path, missing: str) -> None:
    (checkout / "build" / "links" / FILES[missing]).unlink()
    run = run_pytest(checkout, checkout / "build" / "links")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"Not importable yet: {missing}. Run `make venv`" in run.stderr
    assert "passed" not in run.stdout


def test_another_checkout_stops_the_run(checkout: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "links"
    shutil.copytree(checkout / "build" / "links", other)
    run = run_pytest(checkout, other)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "is not this checkout" in run.stderr


def test_an_installed_wheel_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    (installed / "rdzv").mkdir(parents=True)
    (installed / "rdzv" / "__init__.py").write_text("")
    run = run_pytest(checkout, installed)
    assert run.returncode == 0, run.stdout + run.stderr
