"""What a request asks of one replica, and what is known of it there once it is inside.

experience.py works needs out; gate.py decides by them, and prefills.py and stalls.py keep parts of who is inside. Knows
no replica.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.forecast import Terms, attended_by
from gateway.lengths import LengthDistribution
from tenancy.values import value


@value
class Need:
    """In tokens of all its choices together.

    shared: of the prompt, what running requests hold already. uncached: what is to be prefilled. ceiling and lengths:
    of each choice. between_s_max: what it is promised between its tokens. heard: its tokens are seen as they come, and
    `produced` says how many each choice has by now.
    """

    id: str
    prompt_tokens: int
    shared_tokens: int
    uncached_tokens: int
    ceiling: int
    lengths: LengthDistribution
    choices: int = 1
    between_s_max: float = math.inf
    heard: bool = True
    produced: Callable[[], int] = int
    # The same wherever it asks, so they are worked out once: its first terms by page size, what it shares with nobody,
    # and each token to prefill times its mean context.
    drawn: dict[int, Terms] = field(default_factory=dict, compare=False, repr=False)
    private_tokens: int = field(init=False, compare=False, repr=False)
    attended: float = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.private_tokens = self.prompt_tokens - self.shared_tokens  # type: ignore[misc]  # frozen from here on
        self.attended = attended_by(self.uncached_tokens, self.prompt_tokens)  # type: ignore[misc]


@dataclass(eq=False, slots=True)
class Running:
    """A request inside. private_tokens: of its prompt by now; another that shared some of it may have left.

    length: outputs that it surely counts on. redraw_at: outputs at which its terms are drawn anew. lengths: as believed
    by now. entered: how many reports there had been. entered_at, prefilled_by (when its prefill should be over) and
    first_at (its first token) on the gate's clock.
    """

    need: Need
    private_tokens: int
    length: int
    redraw_at: int
    entered: int
    entered_at: float
    prefilled_by: float
    lengths: LengthDistribution
    produced: int = 0
    first_at: float = 0.0
