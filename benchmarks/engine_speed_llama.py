"""llama.cpp's side of engine_speed: run by an interpreter that has llama-cpp-python, told over standard input.

    PYTHON engine_speed_llama.py MODEL.gguf THREADS

Each line of its input is JSON, {"prompts": [[token id, …], …], "tokens": N}; it generates N tokens for each prompt,
greedily, all of them in one batch a step, and answers with a line. Only llama_cpp, numpy and the standard library.
"""

import json
import sys
from typing import Any

import llama_cpp
import numpy as np

_STREAMS_MAX = 16
_CONTEXT_TOKENS = 512  # of a stream
_BATCH_TOKENS = 2048


class Streams:
    """A model with room for so many sequences, computed together."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = _STREAMS_MAX * _CONTEXT_TOKENS
        params.n_seq_max = _STREAMS_MAX
        params.n_batch = params.n_ubatch = _BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        for stream, prompt in enumerate(prompts):
            for place, token in enumerate(prompt):
                self._add(token, place, stream, last=place == len(prompt) - 1)
        chosen = self._step()
        for produced in range(tokens - 1):
            for stream, token in enumerate(chosen):
                self._add(token, len(prompts[stream]) + produced, stream, last=True)
            chosen = self._step()

    def _add(self, token: int, place: int, stream: int, *, last: bool) -> None:
        batch = self._batch
        at = batch.n_tokens
        batch.token[at], batch.pos[at] = token, place
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, stream
        batch.logits[at] = last
        batch.n_tokens = at + 1

    def _step(self) -> list[int]:
        """The most likely token at each place whose logits were asked for."""
        asked = [at for at in range(self._batch.n_tokens) if self._batch.logits[at]]
        if llama_cpp.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._batch.n_tokens = 0
        return [int(np.argmax(self._logits(at))) for at in asked]

    def _logits(self, at: int) -> Any:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, at), shape=(self._words,))


def main() -> None:
    streams = Streams(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        asked = json.loads(line)
        streams.generate(asked["prompts"], asked["tokens"])
        print("done", flush=True)


if __name__ == "__main__":
    main()
