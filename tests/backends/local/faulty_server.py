"""The local engine with a bug in its book-keeping: `python -m tests.backends.local.faulty_server --model-path …`.

Whoever asks for exactly FAULTY_TOKENS tokens has the page that it writes freed under it after its third token.
"""

import sys

from backends.local.engine import Engine, Event
from backends.local.loading import EngineLoader
from backends.local.server import main
from backends.page_tags.table import Claim

FAULTY_TOKENS = 77


class FaultyLoader(EngineLoader):
    def load(self) -> Engine:
        engine = super().load()
        step = engine.step

        def faulty_step() -> list[Event]:
            for sequence in engine.scheduler.running:
                if sequence.max_new_tokens == FAULTY_TOKENS and sequence.completion_tokens == 3:
                    engine.allocator.free(Claim(sequence.pages[-1:], sequence.tags[-1:]))
            return step()

        engine.step = faulty_step  # type: ignore[method-assign]  # the fault is all that differs
        return engine


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FaultyLoader))
