"""docs/writing-a-backend.md to a green run: its files are written, its commands run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-a-backend.md"
TEXT = PAGE.read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", TEXT, flags=re.DOTALL))
COMMANDS = dict(re.findall(r"<!-- run: ([\w ]+) -->\n```sh\n(.*?)```", TEXT, flags=re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(command: str, folder: Path, suites: str = "backend,roster,watch,store,handler") -> str:
    """What the command prints; it must succeed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options = f"--rdzv-suites={suites}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTEST_ADDOPTS": options},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_what_this_runs() -> None:
    assert set(FILES) == {"directory_rdzv.py", "test_directory.py"}
    assert set(COMMANDS) == {"without code", "with code"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "suites",
    ["backend", pytest.param("backend,roster,watch,store,handler", marks=pytest.mark.full)],
)
def test_without_code(folder: Path, suites: str) -> None:
    shown = run(COMMANDS["without code"], folder, suites)
    assert " 0 fail" in shown
    assert "not run" in shown


def test_with_code(folder: Path) -> None:
    shown = run(COMMANDS["with code"], folder)
    assert re.search(r"\d+ passed", shown)
    assert "failed" not in shown
    # What takes a server or another process is not run, and says so.
    assert "it takes a way to" in shown
