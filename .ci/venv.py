"""Makes .venv, in which every target of the Makefile runs; does nothing when it is up to date.

Rules:

* The standard library only, and no syntax newer than Python 3.7, so that an old Python gets a
  sentence and not a SyntaxError.
* Up to date means: .venv/rdzv-stamp.json holds what `wanted_stamp` returns now. Then pip is not
  called at all. Where only the list of the package's files differs, they are linked again (3 s).
* torch comes first and by itself, because on Linux the package index's own build is the one for
  CUDA: gigabytes that no test here uses. pip is asked what it would take; a CUDA build is not
  installed unless the user has set TORCH=cuda.
* One line a step; what pip says goes to .venv/install.log, of which the end is shown on failure.

Environment: TORCH_VERSION, TORCH_INDEX_URL (where CPU builds are), TORCH=cuda.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "rdzv-stamp.json"
LOG = VENV / "install.log"
TORCH_VERSION = os.environ.get("TORCH_VERSION") or "2.13.0"
TORCH_INDEX_URL = os.environ.get("TORCH_INDEX_URL") or "https://download.pytorch.org/whl/cpu"
TORCH_CUDA = os.environ.get("TORCH") == "cuda"
MINIMUM_PYTHON = (3, 10)
PROGRESS_SECONDS = 20
INDEX_TIMEOUT_SECONDS = 15
LOG_TAIL_LINES = 12
PIP_ENVIRONMENT = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_USER": "0"}
UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|Max retries exceeded|ProxyError|ConnectTimeoutError"
    r"|ReadTimeoutError|[Nn]ame resolution|Network is unreachable"
)


class Failure(Exception):
    """What went wrong and what to do about it, for the user."""


class Torch(NamedTuple):
    """What pip would install for a request."""

    request: list[str]
    version: str
    url: str
    cuda: bool


def check_python() -> None:
    if sys.version_info < MINIMUM_PYTHON:
        raise Failure(
            f"rdzv needs Python 3.10 or newer, and {sys.executable} is Python {python_version()}.\n"
            "Install a newer one and name it:  make PYTHON=python3.11 TARGET"
        )
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        sudo = "" if os.geteuid() == 0 else "sudo "
        raise Failure(
            f"{sys.executable} cannot make a virtual environment: its module venv or ensurepip is "
            f"missing.\nOn Debian and Ubuntu:  {sudo}apt install python3-venv"
        )


def python_version() -> str:
    return "{}.{}".format(*sys.version_info[:2])


def wanted_stamp() -> dict[str, str]:
    """All that .venv depends on: the keys are looked at one by one in `prepare`."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    # Read by pattern, since Python 3.10 has no tomllib: the table holds nothing but strings.
    table = project.partition("[tool.setuptools.package-dir]\n")[2].partition("\n[")[0]
    files = sorted(
        path.relative_to(ROOT).as_posix()
        for folder in re.findall(r'=\s*"([^"]+)"', table)
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    )
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    return {
        "root": str(ROOT),
        "python": python_version(),
        "dependencies": digest(project, setup, TORCH_VERSION),
        "files": digest(*files),
    }


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def read_stamp() -> dict[str, str]:
    try:
        found = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def ask_venv(code: str) -> str:
    """What the code prints in .venv's Python; "" where there is none or it fails."""
    try:
        answer = subprocess.run(
            [str(PYTHON), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return ""
    return answer.stdout.decode().strip() if answer.returncode == 0 else ""


def prepare() -> None:
    """Bring .venv to what the checkout needs, by the least work that does."""
    wanted, found = wanted_stamp(), read_stamp()
    linked = any(ROOT.glob("build/__editable__.rdzv-*/rdzv/__init__.py"))
    if found == wanted and linked:
        return
    in_venv = ask_venv("import sys, pip; print('{}.{}'.format(*sys.version_info[:2]))")
    if in_venv != wanted["python"] or found.get("root", str(ROOT)) != str(ROOT):
        make_venv()
        found = {}
    STAMP.unlink(missing_ok=True)
    LOG.write_text("", encoding="utf-8")
    if found.get("dependencies") == wanted["dependencies"]:
        step("linking the package's files anew", pip("--no-deps", "--editable", "."))
    else:
        install_all()
    # A program that is run from here would find this before what is installed, and the build does
    # not refresh it when entry points change.
    shutil.rmtree(ROOT / "rdzv.egg-info", ignore_errors=True)
    STAMP.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")


def make_venv() -> None:
    # Not sys.executable: inside an active .venv that is the very file to be replaced.
    base = getattr(sys, "_base_executable", sys.executable)
    say(f"making .venv with Python {python_version()} ({base})")
    made = subprocess.run(
        [base, "-m", "venv", "--clear", str(VENV)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if made.returncode != 0:
        raise Failure(f"{made.stdout.decode()}\nCould not make {VENV}.")


def install_all() -> None:
    # pip before 23.3 downloads what it only reports about, and the editable install needs both.
    step("bringing pip and setuptools up to date", pip("pip>=24", "setuptools>=77"))
    if ask_venv("import importlib.metadata as m; print(m.version('torch').split('+')[0])") != (
        TORCH_VERSION
    ):
        torch = choose_torch()
        kind = "CUDA build" if torch.cuda else "CPU build"
        step(f"installing torch {torch.version} ({kind}, {size(torch)})", pip(*torch.request))
    step(
        "installing SQLAlchemy, drivers, scikit-learn, pytest, mypy, ruff, test servers "
        "(about 200 MB), linking rdzv",
        pip("--editable", ".[dev]"),
    )


def choose_torch() -> Torch:
    """The CPU build that pip takes by itself, else the one on TORCH_INDEX_URL, else a `Failure`."""
    say(f"asking pip which build of torch {TORCH_VERSION} it would take")
    request = [f"torch=={TORCH_VERSION}"]
    by_default = ask_pip(request)
    if by_default and (TORCH_CUDA or not by_default.cuda):
        return by_default
    found = "a CUDA build" if by_default else "none"
    say(f"found {found}; looking for a CPU build on {TORCH_INDEX_URL}")
    limits = ["--retries", "0", "--timeout", str(INDEX_TIMEOUT_SECONDS)]
    from_cpu_index = ask_pip(["--index-url", TORCH_INDEX_URL, *limits, *request])
    if from_cpu_index and not from_cpu_index.cuda:
        return from_cpu_index._replace(request=["--index-url", TORCH_INDEX_URL, *request])
    if by_default:
        raise Failure(
            f"No CPU build of torch {TORCH_VERSION} for Python {python_version()} was found: the "
            "package index has only the CUDA build (about 3 GB to download, 6 GB on disk), and "
            f"{TORCH_INDEX_URL} did not answer with one. Nothing was installed. One of these:\n"
            "  make TARGET TORCH_INDEX_URL=URL     another index with CPU builds\n"
            "  make TARGET TORCH_VERSION=2.x.y     another release (2.4 or newer)\n"
            "  make TARGET PYTHON=python3.11       another Python that there is a build for\n"
            "  make TARGET TORCH=cuda              take the CUDA build all the same"
        )
    raise Failure(f"pip found no torch {TORCH_VERSION} for this Python.\n{advice()}")


def ask_pip(request: list[str]) -> Torch | None:
    """What pip would install, found without downloading it; None where it finds nothing."""
    command = [*pip("--dry-run", "--quiet", "--ignore-installed", "--report", "-"), *request]
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env=environment(),
        )
    if answer.returncode != 0:
        return None
    chosen = {item["metadata"]["name"]: item for item in json.loads(answer.stdout)["install"]}
    torch = chosen["torch"]
    return Torch(
        request=request,
        version=torch["metadata"]["version"],
        url=torch["download_info"]["url"],
        cuda=any(name.startswith(("nvidia-", "cuda-")) for name in chosen),
    )


def size(torch: Torch) -> str:
    parts = urlsplit(torch.url)
    if parts.scheme == "file":
        return f"{Path(unquote(parts.path)).stat().st_size / 1e6:.0f} MB, from this disk"
    return "about 3 GB to download" if torch.cuda else "about 200 MB to download"


def pip(*arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", "install", "--no-build-isolation", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, **PIP_ENVIRONMENT}


def step(text: str, command: list[str]) -> None:
    """Run a command with its output in the log, and say now and then that it still runs."""
    say(text)
    started = time.monotonic()
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(),
        )
        while True:
            try:
                code = process.wait(timeout=PROGRESS_SECONDS)
                break
            except subprocess.TimeoutExpired:
                say(f"  still at it, {time.monotonic() - started:.0f} s so far")
    if code != 0:
        raise Failure(f"That failed. {advice()}")


def advice() -> str:
    """The end of the log, and what to do if it looks like an unreachable index."""
    text = LOG.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line and "is ignored: it is" not in line]
    tail = "\n".join(f"  | {line[:160]}" for line in lines[-LOG_TAIL_LINES:])
    hint = (
        "\nThe package index cannot be reached: look at the network and the proxy (HTTPS_PROXY), "
        "or name an index of your own in PIP_INDEX_URL. Then run make again."
        if UNREACHABLE.search(text)
        else ""
    )
    return f"The end of {LOG.relative_to(ROOT)}:\n{tail}{hint}"


def say(text: str) -> None:
    print(f"[venv] {text}", flush=True)


def main() -> int:
    try:
        check_python()
        prepare()
    except Failure as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
