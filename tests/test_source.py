"""The shape of the source: layers, who imports what, where statuses are named, documentation, packaging.

Every rule is a function over source text that returns the faults it found, so that each can be shown to
fail on a bad snippet before it is trusted with the package.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import unittest
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jobqueue
from jobqueue import lifecycle
from tests.support import TOP

PACKAGE = "jobqueue"

# Lowest first; a module imports only from rows above its own here, never from its own row.
# "name.*" stands for the modules inside a package.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "times", "text", "signals"),
    ("lifecycle",),
    ("jobs",),
    ("producers", "tracebacks"),
    ("schema", "forks", "place", "refusals"),
    ("connection",),
    ("intake", "leases", "catalogue", "roster"),
    ("batch",),
    ("db",),
    ("shared_commit", "backup", "archive", "history", "selection", "steering", "hints",
     "aio.operations", "aio.moves"),
    ("explain", "arrivals"),
    ("figures", "upkeep", "checkup"),
    ("handlers", "aio.clerk", "oversight"),
    ("child", "events", "aio.lease"),
    ("process",),
    ("memory.parts",),
    ("memory.store",),
    ("pool", "queue", "scheduler", "aio", "memory", "render", "log", "output", "metrics"),
    ("dispatch", "turn", "watch", "progress", "views"),
    ("worker", "dashboard"),
    ("commands",),
    ("commands.common",),
    ("commands.files",),
    ("commands.*",),
    ("cli",),
    ("__main__",),
)

# Modules that may use less than their row allows: handlers run without the database.
ONLY = {
    "handlers": {"errors", "times", "text", "lifecycle", "jobs"},
    "child": {"errors", "times", "text", "lifecycle", "jobs", "handlers", "tracebacks"},
}

SQLITE_MODULES = {"schema", "connection", "refusals"}

# What a single `enqueue` command loads, and what would slow its start.
ENQUEUE_PATH = {
    "__init__", "errors", "times", "lifecycle", "jobs", "producers", "schema", "forks", "place", "refusals",
    "connection", "intake", "cli",
}  # fmt: skip
SLOW_IMPORTS = {
    "asyncio", "contextlib", "dataclasses", "http", "inspect", "logging", "multiprocessing", "random",
    "secrets", "typing",
}  # fmt: skip

STATUSES = ("pending", "running", "retrying", "completed", "failed", "canceled")
QUOTED_STATUS = re.compile(f"'({'|'.join(STATUSES)})'")

TOP_LEVEL = {PACKAGE, "tests", "README.md", "pyproject.toml", "Makefile", ".gitignore", ".ci"}


class Import(NamedTuple):
    line: int
    name: str
    """The absolute dotted name, that of the imported attribute included."""
    eager: bool
    """Carried out when the module is imported: in no function and not for type checkers only."""


def imports(source: str, module: str, is_package: bool = False) -> list[Import]:
    """Find all imports of the package's `module`, those made by `import_module("constant")` included."""
    base = [PACKAGE, *module.split(".")] if module != "__init__" else [PACKAGE]
    if not is_package and module != "__init__":
        base.pop()

    def absolute(name: str, level: int) -> str:
        stem = base[: len(base) - level + 1] if level else []
        return ".".join([*stem, *filter(None, [name])])

    def walk(node: ast.AST, eager: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(node.lineno, alias.name, eager)
            case ast.ImportFrom():
                for alias in node.names:
                    origin = absolute(node.module or "", node.level)
                    yield Import(node.lineno, f"{origin}.{alias.name}", eager)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if _called(node) in IMPORTERS:
                level = len(name) - len(name.lstrip("."))
                yield Import(node.lineno, absolute(name.lstrip("."), level), eager)
            case ast.If() if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                for statement in node.body:
                    yield from walk(statement, False)
                for statement in node.orelse:
                    yield from walk(statement, eager)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                for child in ast.iter_child_nodes(node):
                    yield from walk(child, False)
            case _:
                for child in ast.iter_child_nodes(node):
                    yield from walk(child, eager)

    return list(walk(ast.parse(source), True))


IMPORTERS = {"import_module", "__import__"}


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def layer_of(module: str) -> int | None:
    """Return the number of the row that names the module, or None if none does."""
    parent = module.rpartition(".")[0]
    for number, row in enumerate(LAYERS):
        if module in row or (parent and f"{parent}.*" in row):
            return number
    return None


def owner(name: str) -> str | None:
    """Return the module of this package that a dotted name lies in ("" for the package itself)."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return None
    candidates = [".".join(parts[1:end]) for end in (3, 2) if end <= len(parts)]
    return next((candidate for candidate in candidates if layer_of(candidate) is not None), "")


def layer_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """An import goes to a lower layer; of the package itself only `__version__` may be had."""
    if module == "__init__":
        return [
            f"__init__:{found.line}: imports {found.name} when it is imported, which slows every command"
            for found in imports(source, module)
            if found.eager and owner(found.name) not in (None, *LAYERS[0])
        ]
    own = layer_of(module)
    if own is None:
        return [f"{module}: is in no row of LAYERS in tests/test_source.py: add it where it belongs"]
    faults = []
    for found in imports(source, module, is_package):
        target = owner(found.name)
        if target is None or found.name == f"{PACKAGE}.__version__":
            continue
        layer = layer_of(target)
        if layer is None:
            faults.append(f"{module}:{found.line}: {found.name} is of no module in LAYERS: import from one")
        elif layer >= own:
            faults.append(f"{module}:{found.line}: {target} is not in a layer below {module}")
        elif module in ONLY and target not in ONLY[module]:
            faults.append(f"{module}:{found.line}: {module} must do without {target}")
    return faults


def foreign_faults(source: str, module: str, allowed: set[str], is_package: bool = False) -> list[str]:
    """Nothing is imported but the standard library and `allowed`."""
    known = sys.stdlib_module_names | allowed
    return [
        f"{module}:{found.line}: {found.name} is not in the standard library"
        for found in imports(source, module, is_package)
        if found.name.partition(".")[0] not in known
    ]


def sqlite_faults(source: str, module: str) -> list[str]:
    """Only the modules that own the connection know SQLite, for type checkers too."""
    return [
        f"{module}:{found.line}: only {' and '.join(sorted(SQLITE_MODULES))} import sqlite3"
        for found in imports(source, module)
        if found.name.partition(".")[0] in ("sqlite3", "_sqlite3") and module not in SQLITE_MODULES
    ]


def slow_faults(source: str, module: str) -> list[str]:
    """Nothing on the enqueue path imports what would slow the start, unless inside a function."""
    return [
        f"{module}:{found.line}: {found.name} slows the start of every enqueue"
        for found in imports(source, module)
        if found.eager and found.name.partition(".")[0] in SLOW_IMPORTS and module in ENQUEUE_PATH
    ]


def status_faults(source: str) -> list[str]:
    """No string is a status, and none contains one in single quotes; docstrings are prose and may.

    A docstring here is any string that is a statement of its own.
    """
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in prose:
            text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            if isinstance(text, str) and (text in STATUSES or QUOTED_STATUS.search(text)):
                faults.append(f"line {node.lineno}: {text!r} names a status: take it from lifecycle")
    return faults


def bare_except_faults(source: str) -> list[str]:
    return [
        f"line {node.lineno}: bare except"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def module_docstring_faults(source: str) -> list[str]:
    return [] if ast.get_docstring(ast.parse(source)) else ["no docstring says what the module does"]


def docstring_faults(source: str) -> list[str]:
    """Every public function, class and method has a docstring; overloads and setters share another's."""

    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if child.name.startswith("_"):
                    continue
                decorators = {ast.unparse(each).rpartition(".")[2] for each in child.decorator_list}
                if not ast.get_docstring(child) and not decorators & {"overload", "setter", "deleter"}:
                    yield f"line {child.lineno}: {prefix}{child.name} has no docstring"
                if isinstance(child, ast.ClassDef):
                    yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.If | ast.Try):
                yield from walk(child, prefix)

    return list(walk(ast.parse(source), ""))


def version_faults(pyproject: str, source: str) -> list[str]:
    """The version is written once, as a literal that can be read without importing the package."""
    project = tomllib.loads(pyproject)
    faults = []
    if "version" in project["project"] or "version" not in project["project"].get("dynamic", []):
        faults.append("pyproject.toml has a version of its own")
    if project["tool"]["setuptools"].get("dynamic", {}).get("version") != {"attr": f"{PACKAGE}.__version__"}:
        faults.append("pyproject.toml does not take the version from the package")
    literals = [
        node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__version__"
        and isinstance(node.value, ast.Constant)
    ]
    if len(literals) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", str(literals[0])):
        faults.append(f"__version__ is not one literal like 1.2.3: {literals}")
    return faults


def top_level_faults(names: list[str]) -> list[str]:
    """Only the agreed names lie at the top, and only `run` in `.ci`."""
    strangers = {name.partition("/")[0] for name in names} - TOP_LEVEL
    strangers |= {name for name in names if name.startswith(".ci/") and name != ".ci/run"}
    return sorted(strangers)


def modules() -> dict[str, tuple[str, bool]]:
    """Map each module of the package ("commands.list") to its source and whether it is a package."""
    found = {}
    for path in sorted((TOP / PACKAGE).rglob("*.py")):
        parts = path.relative_to(TOP / PACKAGE).with_suffix("").parts
        is_package = len(parts) > 1 and parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = (path.read_text("utf-8"), is_package)
    return found


def tracked_files() -> list[str] | None:
    """Return the files that git tracks, or None outside a checkout of this project."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    git = ["git", "-c", f"safe.directory={TOP}", "-C", str(TOP)]
    try:
        prefix = _output([*git, "rev-parse", "--show-prefix"], env)
        # A prefix means that the directory lies inside somebody else's checkout.
        if prefix.strip():
            return None
        listing = _output([*git, "ls-files", "-z"], env)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return [name for name in listing.split("\0") if name]


def _output(argv: list[str], env: dict[str, str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, env=env, check=True).stdout


class PackageTest(unittest.TestCase):
    """The package keeps the rules."""

    def setUp(self) -> None:
        self.modules = modules()
        self.assertIn("lifecycle", self.modules)

    def assert_faultless(self, faults_of: Callable[[str, str], list[str]], *exempt: str) -> None:
        """Apply a checker of (source, module) to the package; all faults are shown at once."""
        faults = {name: faults_of(source, name) for name, (source, _) in self.modules.items()}
        self.assertEqual({name: found for name, found in faults.items() if found and name not in exempt}, {})

    def test_a_module_imports_only_from_layers_below(self) -> None:
        self.assert_faultless(lambda source, name: layer_faults(source, name, self.modules[name][1]))

    def test_only_schema_and_connection_import_sqlite3(self) -> None:
        self.assert_faultless(sqlite_faults)

    def test_only_the_standard_library_is_imported(self) -> None:
        self.assert_faultless(lambda source, name: foreign_faults(source, name, {PACKAGE}, self.modules[name][1]))

    def test_the_tests_need_nothing_installed_either(self) -> None:
        paths = sorted((TOP / "tests").rglob("*.py"))
        self.assertTrue(paths)
        faults = [foreign_faults(path.read_text("utf-8"), path.stem, {PACKAGE, "tests"}) for path in paths]
        self.assertEqual([found for found in faults if found], [])

    def test_the_enqueue_path_imports_nothing_slow(self) -> None:
        self.assert_faultless(slow_faults)

    def test_only_lifecycle_names_a_status(self) -> None:
        self.assertEqual(sorted(lifecycle.STATUSES), sorted(STATUSES))
        self.assert_faultless(lambda source, _: status_faults(source), "lifecycle")

    def test_there_is_no_bare_except(self) -> None:
        self.assert_faultless(lambda source, _: bare_except_faults(source))

    def test_every_module_says_what_it_does(self) -> None:
        self.assert_faultless(lambda source, _: module_docstring_faults(source))

    def test_every_public_name_is_documented(self) -> None:
        homes = {getattr(getattr(jobqueue, name), "__module__", PACKAGE) for name in jobqueue.__all__}
        self.assertGreater(len(homes), 1)
        private = set(self.modules) - {home.removeprefix(f"{PACKAGE}.") for home in homes}
        self.assert_faultless(lambda source, _: docstring_faults(source), *private)


class ProjectTest(unittest.TestCase):
    """What lies around the package."""

    def test_the_version_is_written_once(self) -> None:
        pyproject = (TOP / "pyproject.toml").read_text("utf-8")
        self.assertEqual(version_faults(pyproject, modules()["__init__"][0]), [])

    def test_nothing_has_to_be_installed(self) -> None:
        project = tomllib.loads((TOP / "pyproject.toml").read_text("utf-8"))["project"]
        self.assertEqual(project["dependencies"], [])
        self.assertEqual(project["requires-python"], ">=3.11")

    def test_the_top_level_holds_only_the_agreed_names(self) -> None:
        names = tracked_files()
        if not names:
            self.skipTest("not in a git checkout with files in it")
        self.assertEqual(top_level_faults(names), [])


class CheckerTest(unittest.TestCase):
    """Each checker finds what it is there for, and nothing in good code."""

    def test_layers(self) -> None:
        bad = [
            ("lifecycle", "from .jobs import Job"),
            ("lifecycle", "from jobqueue.jobs import Job"),
            ("lifecycle", "import jobqueue.jobs"),
            ("lifecycle", "from . import jobs"),
            ("lifecycle", "def f():\n    from .jobs import Job"),
            ("lifecycle", "if TYPE_CHECKING:\n    from .jobs import Job"),
            ("lifecycle", "import importlib\nimportlib.import_module('jobqueue.jobs')"),
            ("lifecycle", "import_module('.jobs', __package__)"),
            ("errors", "from .times import parse"),
            ("schema", "from .connection import connect"),
            ("queue", "from .render import table"),
            ("queue", "from jobqueue import handler"),
            ("queue", "import jobqueue"),
            ("queue", "from .misspelt import x"),
            ("handlers", "from .schema import TABLES"),
            ("child", "from .db import Store"),
            ("commands.list", "from .show import main"),
            ("commands.list", "from . import show"),
            ("commands.list", "from ..cli import main"),
            ("worker", "from .commands.list import main"),
            ("__init__", "from .jobs import Job"),
            ("__init__", "try:\n    from .db import Store\nexcept ImportError:\n    pass"),
        ]
        for module, source in bad:
            with self.subTest(module=module, source=source):
                self.assertEqual(len(layer_faults(source, module)), 1)
        good = [
            ("lifecycle", "from .errors import InvalidJob\nimport json"),
            ("cli", "from . import __version__\nfrom .commands.list import main"),
            ("commands.list", "from ..render import table"),
            ("commands.list", "from .. import render"),
            ("__main__", "from jobqueue.cli import main"),
            ("__init__", "from .errors import InvalidJob\ndef f():\n    from .queue import Queue"),
            ("__init__", "if TYPE_CHECKING:\n    from .queue import Queue as Queue"),
        ]
        for module, source in good:
            with self.subTest(module=module, source=source):
                self.assertEqual(layer_faults(source, module), [])
        self.assertEqual(layer_faults("from ..render import table", "commands", True), [])
        self.assertEqual(len(layer_faults("from .list import main", "commands", True)), 1)

    def test_a_module_missing_from_the_table_is_told_to_be_added(self) -> None:
        (fault,) = layer_faults("", "novelty")
        self.assertIn("novelty", fault)
        self.assertIn("add it", fault)

    def test_every_row_is_named_once(self) -> None:
        names = [name for row in LAYERS for name in row]
        self.assertEqual(len(names), len(set(names)))
        self.assertLessEqual(set(ONLY), set(names))
        self.assertLessEqual(ENQUEUE_PATH - {"__init__"}, set(names))

    def test_sqlite(self) -> None:
        for source in ("import sqlite3", "from sqlite3 import Row", "def f():\n    import sqlite3.dbapi2"):
            self.assertEqual(len(sqlite_faults(source, "queue")), 1)
            self.assertEqual(sqlite_faults(source, "connection"), [])

    def test_foreign(self) -> None:
        self.assertEqual(len(foreign_faults("import requests, json", "queue", {PACKAGE})), 1)
        self.assertEqual(len(foreign_faults("from yaml.nodes import Node", "queue", {PACKAGE})), 1)
        self.assertEqual(len(foreign_faults("from tests.support import run", "queue", {PACKAGE})), 1)
        self.assertEqual(foreign_faults("from . import db\nimport os.path", "queue", {PACKAGE}), [])
        self.assertEqual(foreign_faults("from .lease import Lease", "aio", {PACKAGE}, True), [])

    def test_slow(self) -> None:
        self.assertEqual(len(slow_faults("from typing import Any", "cli")), 1)
        self.assertEqual(len(slow_faults("class A:\n    import http.client", "cli")), 1)
        self.assertEqual(slow_faults("if TYPE_CHECKING:\n    from typing import Any", "cli"), [])
        self.assertEqual(slow_faults("def f():\n    import secrets", "leases"), [])
        self.assertEqual(slow_faults("import logging", "worker"), [])

    def test_statuses(self) -> None:
        bad = [
            "x = 'pending'",
            "x = b'failed'",
            "f({'completed': 1})",
            "x = \"UPDATE jobs SET status = 'running' WHERE seq = ?\"",
            "x = f\"SELECT {y} WHERE status IN ('retrying', {z})\"",
            "def f(x='canceled'): ...",
        ]
        for source in bad:
            with self.subTest(source=source):
                self.assertEqual(len(status_faults(source)), 1)
        good = [
            '"""A job is \'pending\' until it is claimed."""',
            "X = 1\n\"'failed' or 'canceled'\"",
            "def f():\n    \"\"\"failed\"\"\"",
            "x = 'retry-failed puts failed jobs back to pending'",
            "x = 'a --status failed'",
            "pending = running.failed",
        ]
        for source in good:
            with self.subTest(source=source):
                self.assertEqual(status_faults(source), [])

    def test_bare_except(self) -> None:
        self.assertEqual(len(bare_except_faults("try:\n    f()\nexcept:\n    pass")), 1)
        self.assertEqual(bare_except_faults("try:\n    f()\nexcept OSError:\n    pass"), [])

    def test_docstrings(self) -> None:
        self.assertEqual(len(module_docstring_faults("import os")), 1)
        self.assertEqual(module_docstring_faults("'''Does.'''"), [])
        bad = [
            "def f(): ...",
            "async def f(): ...",
            "class A: ...",
            "class A:\n    '''A.'''\n    def f(self): ...",
            "class A:\n    '''A.'''\n    class B: ...",
            "if X:\n    def f(): ...",
        ]
        for source in bad:
            with self.subTest(source=source):
                self.assertEqual(len(docstring_faults(source)), 1)
        good = [
            "def _f(): ...\nclass _A:\n    def f(self): ...",
            "def f():\n    '''Do.'''\n    def g(): ...",
            "@overload\ndef f(): ...",
            "class A:\n    '''A.'''\n    def __init__(self): ...",
        ]
        for source in good:
            with self.subTest(source=source):
                self.assertEqual(docstring_faults(source), [])

    def test_version(self) -> None:
        good = (
            '[project]\ndynamic = ["version"]\n'
            '[tool.setuptools.dynamic]\nversion = {attr = "jobqueue.__version__"}'
        )
        self.assertEqual(version_faults(good, "__version__ = '1.2.3'"), [])
        self.assertEqual(len(version_faults(good, "__version__ = compute()")), 1)
        self.assertEqual(len(version_faults(good, "")), 1)
        static = '[project]\nversion = "1.2.3"\n[tool.setuptools]'
        self.assertEqual(len(version_faults(static, "__version__ = '1.2.3'")), 2)

    def test_top_level(self) -> None:
        self.assertEqual(top_level_faults(["jobqueue/db.py", ".ci/run", "Makefile"]), [])
        self.assertEqual(
            top_level_faults(["notes.md", "docs/a/b.md", ".ci/more", "jobqueue/x"]),
            [".ci/more", "docs", "notes.md"],
        )


if __name__ == "__main__":
    unittest.main()
