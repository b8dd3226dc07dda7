"""What the packages import is declared: a stranger's environment has nothing else."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("api", "gateway", "backends", "billing", "tenancy")
# Parts of what is declared, which its makers publish by names of their own.
BROUGHT_ALONG = {"starlette", "pydantic-core", "markupsafe", "yarl"}
# In the environment of the engine that operators run.
IN_SGLANGS_ENVIRONMENT = {"sglang", "torch", "triton"}


def test_every_import_is_of_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {_name(line) for line in project["dependencies"]}
    extras = project["optional-dependencies"].items()
    declared |= BROUGHT_ALONG | {_name(line) for extra, lines in extras if extra != "test" for line in lines}
    distributions = packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in _sources()
        for module in _imports(path)
        if module not in OURS
        and module not in sys.stdlib_module_names
        and module not in IN_SGLANGS_ENVIRONMENT
        and not {_name(found) for found in distributions.get(module, [module])} & declared
    }
    assert undeclared == set()


def _sources() -> Iterator[Path]:
    for package in OURS:
        yield from sorted((ROOT / package).rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _name(requirement: str) -> str:
    """As package indexes compare names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()
