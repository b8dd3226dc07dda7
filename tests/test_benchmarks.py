"""Every benchmark that a README names says what it does, and runs nothing, when it is asked for help."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# One process for all: most of the time goes to importing torch.
PROGRAM = """
import contextlib, importlib.util, io, runpy, sys

for name in sys.argv[1:]:
    sys.argv[:] = [name, "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            values = runpy.run_module(name, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            print(name, "ends with", ended.code)
    else:
        print(name, "did what it does")
    source = importlib.util.find_spec(name).loader.get_source(name)
    about = compile(source, name, "exec").co_consts[0].splitlines()[0]
    if "".join(about.split()) not in "".join(said.getvalue().split()):
        print(name, "says", said.getvalue()[:200])
"""


def named() -> set[str]:
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "benchmarks").rglob("*.md"))]
    words = {word for text in texts for word in re.findall(r"(?:-m |python )(benchmarks[./][\w./]+)", text)}
    return {word.removesuffix(".py").replace("/", ".") for word in words}


@pytest.mark.engine
def test_all_that_are_named_say_what_they_do() -> None:
    names = sorted(named())
    assert "benchmarks.gateway_cost" in names
    assert "benchmarks.h200.tables" in names
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
