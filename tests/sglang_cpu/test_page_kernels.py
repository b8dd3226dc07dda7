"""The CUDA kernels of the page tags against the steps in torch that define them, by Triton's interpreter on the CPU."""

import os
import subprocess

import pytest

from tests.engines import ROOT
from tests.sglang_cpu.server import sglang_python

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def test_kernels_and_steps_keep_the_same_book_in_any_history() -> None:
    """SGLang's environment has Triton; ours has not."""
    ran = subprocess.run(
        [sglang_python(), "-m", "tests.sglang_cpu.kernel_histories", "cpu", "6"],
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "equal in 6 histories" in ran.stdout
