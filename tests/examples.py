"""How many examples a property is given that needs more or fewer than the hundred of Hypothesis."""

from hypothesis import settings

_USUAL = 100
_MIN = 5


def examples(count: int) -> int:
    """`count` where all tests run; a profile that draws fewer than usual draws fewer of these in proportion."""
    return max(min(count, _MIN), count * settings().max_examples // _USUAL)
