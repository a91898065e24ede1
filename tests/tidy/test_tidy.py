"""What no linter knows about this code base: which way imports point, what is pure, what is long.

Each check is a function from one parsed file to a list of complaints. The first half of the tests
runs them over the repository, the second half shows that each of them can fail.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
MAXIMUM_FILE_LINES = 500
MAXIMUM_FUNCTION_LINES = 60
FOLDERS_OUTSIDE_THE_PACKAGE = (".ci", "benchmarks", "docs", "examples", "tests")

LAYERS: tuple[tuple[str, frozenset[str]], ...] = (
    # From the inside out: a module imports from its own layer and from those above it here. A
    # name stands for its sub-modules too, but for "rdzv", which is handler/__init__.py alone.
    ("words", frozenset({"rdzv.ports", "rdzv.errors", "rdzv.state"})),
    ("rules", frozenset({"rdzv.admission", "rdzv.machine", "rdzv.ranks", "rdzv.codec"})),
    (
        "effects",
        frozenset({"rdzv.protocol", "rdzv.running", "rdzv.steps", "rdzv.effects", "rdzv.settings"}),
    ),
    (
        "edge",
        frozenset(
            {"rdzv", "rdzv.adapters", "rdzv.address", "rdzv.cli", "rdzv.driver", "rdzv.handler"}
            | {"rdzv.keepalive", "rdzv.registry", "rdzv.round_store", "rdzv.torchrun"}
            | {"rdzv.bootstrap", "rdzv.departure", "rdzv.torch_store"}
        ),
    ),
    ("backends", frozenset({"rdzv.backends"})),
    ("stores", frozenset({"rdzv.stores"})),
    ("conformance", frozenset({"rdzv.conformance"})),
)
PURE_MODULES = frozenset(
    {"rdzv.state", "rdzv.machine", "rdzv.ranks", "rdzv.codec", "rdzv.protocol", "rdzv.effects"}
    | {"rdzv.steps", "rdzv.running", "rdzv.admission"}
)
# No clock, random numbers, thread, socket, file, log or torch: what is not named here is not pure.
PURE_LIBRARIES = frozenset(
    {"__future__", "abc", "base64", "binascii", "bisect", "collections", "dataclasses", "enum"}
    | {"functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "re", "string"}
    | {"struct", "types", "typing", "unicodedata", "zlib"}
)
# Whether the first positional argument is the reason.
NEED_A_REASON = {
    "pytest.skip": True,
    "pytest.xfail": True,
    "pytest.mark.skip": True,
    "pytest.mark.skipif": False,
    "pytest.mark.xfail": False,
    "pytest.importorskip": False,
}
IMPURE_BUILTINS = frozenset({"__import__", "eval", "exec", "input", "open", "print"})


class Import(NamedTuple):
    bound: str
    """The name it is known by in the file."""
    name: str
    """The full name of what is imported."""
    line: int


@dataclass(frozen=True)
class Source:
    """One file, parsed once."""

    path: str
    module: str
    """The name under which it is imported; "" outside the package."""
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @functools.cached_property
    def imports(self) -> list[Import]:
        """Those inside functions and under TYPE_CHECKING too."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                base = f"{self._absolute(node)}." if isinstance(node, ast.ImportFrom) else ""
                found += [
                    Import(alias.asname or alias.name, base + alias.name, node.lineno)
                    for alias in node.names
                ]
        return found

    @functools.cached_property
    def bound(self) -> dict[str, str]:
        return {item.bound: item.name for item in self.imports}

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        parents = parts[: len(parts) - node.level + self.path.endswith("__init__.py")]
        return ".".join([*parents, *filter(None, [node.module])])

    def full_name(self, node: ast.expr) -> str:
        """`pytest.mark.skip` for whatever this file calls it; "" for what is no dotted name."""
        if isinstance(node, ast.Attribute):
            base = self.full_name(node.value)
            return f"{base}.{node.attr}" if base else ""
        if isinstance(node, ast.Name):
            return self.bound.get(node.id, node.id)
        return ""


def layer_of(module: str) -> int | None:
    while module:
        for index, (_, members) in enumerate(LAYERS):
            if module in members:
                return index
        parent = module.rpartition(".")[0]
        module = "" if parent == "rdzv" else parent
    return None


def module_imported(name: str) -> str:
    """The module of the package that an imported full name belongs to: `rdzv.errors` for
    `rdzv.errors.mask_secrets`, "rdzv" for `rdzv.create_handler`, "" for other packages' names."""
    if name.split(".")[0] != "rdzv":
        return ""
    return name if layer_of(name) is not None else "rdzv"


def check_layers(source: Source) -> list[str]:
    if not source.module:
        return []
    own = layer_of(source.module)
    if own is None:
        return [
            f"{source.path}: {source.module} is in no layer; add it to LAYERS in tests/tidy/"
            "test_tidy.py, and to PURE_MODULES there if it decides or describes only"
        ]
    complaints = []
    for _, name, line in source.imports:
        top = name.split(".")[0]
        if top in ("backends", "handler", "stores", "tests", "conftest"):
            complaints.append(f"{source.path}:{line}: {name} exists only in the repository")
        target = module_imported(name)
        layer = layer_of(target) if target else None
        if layer is not None and layer > own:
            complaints.append(
                f"{source.path}:{line}: {LAYERS[own][0]} ({source.module}) must not import "
                f"{LAYERS[layer][0]} ({name}): imports point inwards"
            )
    return complaints


def check_purity(source: Source) -> list[str]:
    if source.module not in PURE_MODULES:
        return []
    complaints = [
        f"{source.path}:{line}: {source.module} is pure and must not import {name}"
        for _, name, line in source.imports
        if name.split(".")[0] not in PURE_LIBRARIES | {"rdzv"}
    ]
    complaints += [
        f"{source.path}:{node.lineno}: {source.module} is pure and must not use {node.id}()"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Name) and node.id in IMPURE_BUILTINS
    ]
    return complaints


def check_lengths(source: Source) -> list[str]:
    complaints = []
    lines = len(source.text.splitlines())
    if lines > MAXIMUM_FILE_LINES:
        complaints.append(f"{source.path}: {lines} lines, at most {MAXIMUM_FILE_LINES}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAXIMUM_FUNCTION_LINES:
                complaints.append(
                    f"{source.path}:{node.lineno}: {node.name} has {lines} lines, "
                    f"at most {MAXIMUM_FUNCTION_LINES}"
                )
    return complaints


def check_sleep(source: Source) -> list[str]:
    # A program that a test starts is a workload, and may take its time.
    if not source.path.startswith("tests/") or "if __name__ ==" in source.text:
        return []
    uses = [(name, line) for _, name, line in source.imports] + [
        (source.full_name(node), node.lineno)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
    ]
    return [
        f"{source.path}:{line}: time.sleep in a test; poll a condition with a deadline "
        "(threading.Event.wait), or pass in a clock"
        for name, line in uses
        if name == "time.sleep"
    ]


def check_reasons(source: Source) -> list[str]:
    """Everything that keeps a test from counting says why."""
    calls = {id(node.func): node for node in ast.walk(source.tree) if isinstance(node, ast.Call)}
    complaints = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        name = source.full_name(node)
        if name not in NEED_A_REASON:
            continue
        reasons: list[ast.expr] = []
        if id(node) in calls:
            call = calls[id(node)]
            reasons = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
            reasons += call.args[:1] if NEED_A_REASON[name] else []
        if not any(not isinstance(reason, ast.Constant) or reason.value for reason in reasons):
            complaints.append(f"{source.path}:{node.lineno}: {name} without a reason")
    return complaints


def check_leftovers(source: Source) -> list[str]:
    words = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
    return [
        f"{source.path}:{number}: {found[0]}; do it, or file an issue"
        for number, line in enumerate(source.text.splitlines(), 1)
        if (found := words.search(line))
    ]


def find_cycle(sources: list[Source]) -> list[str]:
    """The modules of one ring of imports, if there is one."""
    graph = {
        source.module: {
            target
            for _, name, _ in source.imports
            if (target := known_module(name, sources)) and target != source.module
        }
        for source in sources
        # The package's front door names what is behind it, and opens lazily.
        if source.module not in ("", "rdzv")
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def known_module(name: str, sources: list[Source]) -> str:
    modules = {source.module for source in sources}
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return "" if name == "rdzv" else name


CHECKS = (
    check_layers,
    check_purity,
    check_lengths,
    check_sleep,
    check_reasons,
    check_leftovers,
)


# ------------------------------------------------------------------------------ the repository


@functools.cache
def repository() -> list[Source]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    modules: dict[Path, str] = {}
    for package, folder in project["tool"]["setuptools"]["package-dir"].items():
        for path in python_files(ROOT / folder):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[path] = ".".join([package, *parts]).removesuffix(".__init__")
    for folder in FOLDERS_OUTSIDE_THE_PACKAGE:
        for path in python_files(ROOT / folder):
            modules.setdefault(path, "")
    return [
        Source(path.relative_to(ROOT).as_posix(), module, path.read_text(encoding="utf-8"))
        for path, module in sorted(modules.items())
    ]


def python_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def test_the_repository_is_found() -> None:
    modules = {source.module for source in repository()}
    assert {"rdzv", "rdzv.ports", "rdzv.backends", "rdzv.stores", "rdzv.conformance"} <= modules
    assert "tests/tidy/test_tidy.py" in {source.path for source in repository()}


@pytest.mark.parametrize("check", CHECKS)
def test_repository(check: Callable[[Source], list[str]]) -> None:
    complaints = [complaint for source in repository() for complaint in check(source)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_repository_has_no_ring_of_imports() -> None:
    assert find_cycle(repository()) == []


def test_every_pure_module_is_in_a_layer() -> None:
    assert all(layer_of(module) is not None for module in PURE_MODULES)


# ---------------------------------------------------------------- the checks themselves can fail

BAD = [
    (check_layers, "rdzv.state", "from rdzv.machine import decide", "imports point inwards"),
    (check_layers, "rdzv.machine", "def f():\n    import rdzv.driver", "imports point inwards"),
    (check_layers, "rdzv.machine", "from rdzv import protocol", "imports point inwards"),
    (check_layers, "rdzv.machine", "from . import protocol", "imports point inwards"),
    (check_layers, "rdzv.machine", "from .protocol import join", "imports point inwards"),
    (check_layers, "rdzv.protocol", "from rdzv import create_handler", "imports point inwards"),
    (check_layers, "rdzv.driver", "from rdzv.backends import memory", "imports point inwards"),
    (check_layers, "rdzv.backends.sql.rows", "import rdzv.stores.sql", "imports point inwards"),
    (check_layers, "rdzv.stores.base", "import rdzv.conformance", "imports point inwards"),
    (
        check_layers,
        "rdzv.codec",
        "if TYPE_CHECKING:\n    from rdzv.settings import Settings",
        "imports point inwards",
    ),
    (check_layers, "rdzv.stores.base", "import backends.redis", "only in the repository"),
    (check_layers, "rdzv.surprise", "", "add it to LAYERS"),
    (check_purity, "rdzv.machine", "import time", "must not import time"),
    (check_purity, "rdzv.codec", "from random import random", "must not import random.random"),
    (check_purity, "rdzv.state", "import torch.distributed as dist", "must not import torch"),
    (check_purity, "rdzv.protocol", "def f():\n    import logging", "must not import logging"),
    (check_purity, "rdzv.effects", "print(1)", "must not use print()"),
    (check_lengths, "", "def f():\n" + "    pass\n" * 60, "f has 61 lines"),
    (check_lengths, "", "class A:\n  async def g():\n" + "    pass\n" * 60, "g has 61 lines"),
    (check_lengths, "", "\n" * 501, "501 lines"),
    (check_sleep, "", "import time\ntime.sleep(1)", "time.sleep in a test"),
    (check_sleep, "", "import time as clock\nclock.sleep(1)", "time.sleep in a test"),
    (check_sleep, "", "from time import sleep", "time.sleep in a test"),
    (check_reasons, "", "import pytest\n@pytest.mark.skip\ndef test(): ...", "mark.skip without"),
    (check_reasons, "", "import pytest\npytest.mark.skipif(True)", "skipif without"),
    (check_reasons, "", "import pytest\npytest.mark.xfail(strict=True)", "xfail without"),
    (check_reasons, "", "from pytest import mark\nmark.xfail(reason='')", "xfail without"),
    (check_reasons, "", "import pytest as p\np.skip()", "pytest.skip without"),
    (check_reasons, "", "from pytest import importorskip\nimportorskip('x')", "skip without"),
    (check_leftovers, "", "x = 1  # TO" + "DO: more", "do it, or file"),
    (check_leftovers, "", '"""FIX' + 'ME"""', "do it, or file"),
]
GOOD = [
    (check_layers, "rdzv.driver", "from rdzv.handler import create_handler"),
    (check_layers, "rdzv.machine", "import json\nfrom rdzv.errors import mask_secrets"),
    (check_layers, "rdzv.stores.sql", "from rdzv.backends.sql import connect\nimport rdzv.ports"),
    (check_layers, "rdzv.handler", "import handlers, backends_of_others"),
    (check_layers, "", "from tests.sim import world"),
    (check_purity, "rdzv.machine", "from collections.abc import Iterable\nimport rdzv.state"),
    (check_purity, "rdzv.driver", "import time, torch\nprint(1)"),
    (check_lengths, "", "def f():\n" + "    pass\n" * 59),
    (check_lengths, "", "\n" * 500),
    (check_sleep, "", "import time\ntime.monotonic()\nclock.sleep(1)"),
    (
        check_reasons,
        "",
        "import pytest\npytest.skip(f'no {server}')\npytest.mark.xfail(reason='x')",
    ),
    (check_leftovers, "", "x = 'MASTODON'"),
]


def snippet(module: str, text: str) -> Source:
    return Source(f"{'handler' if module else 'tests'}/snippet.py", module, text)


@pytest.mark.parametrize(("check", "module", "text", "complaint"), BAD)
def test_bad_snippet_is_found(
    check: Callable[[Source], list[str]], module: str, text: str, complaint: str
) -> None:
    complaints = check(snippet(module, text))
    assert len(complaints) == 1
    assert complaint in complaints[0]


@pytest.mark.parametrize(("check", "module", "text"), GOOD)
def test_good_snippet_is_left_alone(
    check: Callable[[Source], list[str]], module: str, text: str
) -> None:
    assert check(snippet(module, text)) == []


def test_relative_import_in_a_package_is_resolved_from_the_package_itself() -> None:
    source = Source("backends/sql/__init__.py", "rdzv.backends.sql", "from .rows import Row")
    assert [item.name for item in source.imports] == ["rdzv.backends.sql.rows.Row"]


def test_sleep_is_allowed_in_programs() -> None:
    text = "import time\ntime.sleep(1)\n"
    assert check_sleep(Source("examples/train.py", "", text)) == []
    main = "if __name__ == '__main__':\n    main()\n"
    assert check_sleep(Source("tests/e2e/worker.py", "", text + main)) == []


def test_ring_of_imports_is_found() -> None:
    ring = [
        snippet("rdzv.driver", "import rdzv.handler"),
        snippet("rdzv.handler", "def f():\n    from rdzv.keepalive import Thread"),
        snippet("rdzv.keepalive", "from rdzv import driver"),
    ]
    assert set(find_cycle(ring)) == {"rdzv.driver", "rdzv.handler", "rdzv.keepalive"}
    assert find_cycle(ring[:2]) == []
