"""How many examples a property is given that needs more or fewer than the hundred of Hypothesis, and how long."""

from hypothesis import settings

_USUAL = 100
_MIN = 5


def examples(count: int) -> int:
    """`count` where all tests run; a profile that draws fewer or more than usual draws these in proportion."""
    return max(min(count, _MIN), count * settings().max_examples // _USUAL)


def time_for(seconds: int) -> int:
    """`seconds` where all tests run, and longer in proportion where more examples are drawn."""
    return max(seconds, seconds * settings().max_examples // _USUAL)
