"""The local engine with a bug in its book-keeping: `python -m tests.backends.local.faulty_server --model-path …`.

Whoever asks for exactly FAULTY_TOKENS tokens has the page that it writes freed under it after its third token.
"""

import sys
from collections.abc import Callable

from backends.local.engine import Engine, Event, load_engine
from backends.local.server import main
from backends.local.settings import EngineSettings
from backends.page_tags.table import Claim

FAULTY_TOKENS = 77


def load_faulty_engine(settings: EngineSettings, clock: Callable[[], float]) -> Engine:
    engine = load_engine(settings, clock)
    step = engine.step

    def faulty_step() -> list[Event]:
        for sequence in engine.scheduler.running:
            if sequence.max_new_tokens == FAULTY_TOKENS and sequence.completion_tokens == 3:
                engine.allocator.free(Claim(sequence.pages[-1:], sequence.tags[-1:]))
        return step()

    engine.step = faulty_step  # type: ignore[method-assign]  # the fault is all that differs
    return engine


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], load_faulty_engine))
