"""What Hypothesis draws under `derandomize`: the same in every run of the same code.

Hypothesis draws now and then a constant of the project's modules, of those that have been imported by then. Which these
are depends on the tests that ran before in the same process, so that a property could fail in one run and hold in the
next. conftest.py registers this. Profiles that draw at random keep the constants.
"""

from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

# There is no setting for it; tests/test_same_examples.py says when Hypothesis has changed.
_of_modules = providers._get_local_constants
_NONE = Constants()


def draw_the_same_examples() -> None:
    providers._get_local_constants = _constants


def _constants() -> Constants:
    return _NONE if settings().derandomize else _of_modules()
