"""For tests: SGLang forks its processes, so that a server imports it once. A plugin of its own, loaded by SGLang alone.

By itself SGLang spawns them and each imports everything again, which is two thirds of the CPU of a start. A fork takes
the import along, the plugins and the parsed command line; there are no requests yet, and no tensors. It is nothing for
operators: a GPU's context is not for children. The server of test_page_tags.py is started as theirs are.
"""

import multiprocessing

_set_start_method = multiprocessing.set_start_method


def register() -> None:
    """Called by SGLang in the process that is to start the others."""
    multiprocessing.set_start_method = _fork


def _fork(method: str | None, force: bool = False) -> None:  # noqa: FBT001, FBT002  as multiprocessing's is
    """Whatever was asked for."""
    assert method == "spawn", f"SGLang asks for {method}: see whether it can still be forked"
    _set_start_method("fork", force=force)
