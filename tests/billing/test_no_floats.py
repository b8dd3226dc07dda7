"""No floating point where money is computed: neither a literal, nor a conversion, nor a true division."""

import ast
from pathlib import Path

import pytest

_BILLING = Path(__file__).resolve().parents[2] / "billing"
# What handles files and waiting, and no money.
_NO_MONEY = {"frames.py", "metrics.py", "segments.py", "settings.py", "spool.py", "sync_thread.py"}
_MONEY_PATHS = sorted(path for path in _BILLING.rglob("*.py") if path.name not in _NO_MONEY)
# Seconds of waiting are no money.
_ALLOWED_LITERALS = {"metering": {0.2, 5.0}}


def _faults(source: str, allowed: set[float]) -> list[str]:
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in allowed:
            faults.append(f"line {node.lineno}: float literal {node.value}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("float", "round"):
            faults.append(f"line {node.lineno}: {node.func.id}()")
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            faults.append(f"line {node.lineno}: true division")
    return faults


@pytest.mark.parametrize("path", _MONEY_PATHS, ids=lambda path: path.stem)
def test_money_is_computed_in_integers(path: Path) -> None:
    assert _faults(path.read_text(), _ALLOWED_LITERALS.get(path.stem, set())) == []


@pytest.mark.parametrize("source", ["x = 1.5", "x = float(y)", "x = y / 2", "x /= 2", "x = round(y)"])
def test_the_check_finds_each_kind(source: str) -> None:
    assert len(_faults(source, set())) == 1
