"""What a request asks of a model's replicas, what it is expected to take, and what it turned out to be.

The words of placing.py and of all who deal with it: the pipeline makes a Want of a run (run_want.py), the replay of a
traced request.
"""

import math
from collections.abc import Callable

from tenancy.values import value


@value
class Want:
    """What a request asks for: its exact prompt, and the most that each of its choices may produce.

    blocks: of the prompt (prefixes.py). session: the client's word for requests that belong together, within the
    tenant; empty for none. first_s_max, between_s_max: what its class promises. heard: its tokens are seen as they
    come, and `produced` says how many each choice has. digest: of the prompt, to know the request again when it comes
    back; asked for only where somebody waits. regions: where its prompt may go, whatever else; None: anywhere.
    revision: of the model, that serves it; empty for any. elsewhere: where that one has no room now, another may.
    """

    request_id: str
    tenant: str
    endpoint: str
    prompt_tokens: int
    choices: int
    cap_tokens: int
    blocks: tuple[int, ...] = ()
    session: str = ""
    tier: int = 0
    weight: float = 1.0
    first_s_max: float = math.inf
    between_s_max: float = math.inf
    heard: bool = True
    produced: Callable[[], int] = int
    digest: Callable[[], bytes] = bytes
    regions: frozenset[str] | None = None
    revision: str = ""
    elsewhere: bool = True


@value
class Expected:
    """A request's forecast. cost_s: dominant seconds of a replica. first_s: from entering an engine that prefills
    nothing else to its first token. cached_share: of its prompt, at the replica that has most of it.
    """

    cost_s: float
    first_s: float
    cached_share: float


@value
class Ended:
    """What a request turned out to be. produced: by its longest choice; 0 if the engine never started it.

    uncached: prompt tokens that were prefilled. between_s: the mean time between its tokens; first_s: from dispatch to
    its first token; whole_s: from dispatch to its end. None where not seen.
    """

    produced: int
    uncached: int
    first_s: float | None = None
    between_s: float | None = None
    whole_s: float | None = None
