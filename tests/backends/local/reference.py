"""transformers, whose models and tokenizers ours must equal.

Imported when a test asks: every worker collects all tests, and it was a tenth of what they import.
"""

from importlib import import_module
from typing import Any


def transformers(part: str = "") -> Any:
    """The package, or a module in it."""
    return import_module(f"transformers.{part}" if part else "transformers")
