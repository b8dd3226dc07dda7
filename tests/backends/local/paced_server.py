"""The local engine at a pace that no machine exceeds: `python -m tests.backends.local.paced_server --step-ms 20 …`.

Each step takes so long at least, so that a stream of a given length lasts as long as a test needs it to.
"""

import argparse
import sys
import time
from collections.abc import Callable

from backends.local.engine import Engine, Event
from backends.local.loading import EngineLoader
from backends.local.server import main
from backends.local.settings import EngineSettings


def paced(step_s: float) -> Callable[[EngineSettings], EngineLoader]:
    class PacedLoader(EngineLoader):
        def load(self) -> Engine:
            engine = super().load()
            step = engine.step

            def paced_step() -> list[Event]:
                time.sleep(step_s)
                return step()

            engine.step = paced_step  # type: ignore[method-assign]  # the pace is all that differs
            return engine

    return PacedLoader


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--step-ms", type=float, required=True)
    pace, others = parser.parse_known_args()
    sys.exit(main(others, paced(pace.step_ms / 1000)))
