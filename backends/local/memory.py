"""Memory that Python and torch have freed, given back to the system. Called by the worker after a release.

Large tensors are mapped one by one and go when they are freed; what is smaller stays with the allocator of the C
library, which keeps it for later.
"""

import ctypes
from collections.abc import Callable


def give_back_freed() -> None:
    """Without effect where the C library is not glibc."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
