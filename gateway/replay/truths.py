"""What a simulated fleet's replicas really hold, which no gateway sees at once. Used by fleets.py alone. Pure."""

from dataclasses import dataclass, field

from gateway.replay.requests import SimulatedRequest

STEP_S = 0.01


@dataclass(slots=True)
class Running:
    request: SimulatedRequest
    gateway: int
    counted: bool
    since: float


@dataclass(slots=True)
class Truth:
    """One replica as it is. Every running request has its prompt, and a token more with every step."""

    running: dict[str, Running] = field(default_factory=dict)
    prompts: int = 0
    started_sum: float = 0.0  # of the running requests' start times

    def used(self, now: float) -> int:
        return self.prompts + int((len(self.running) * now - self.started_sum) / STEP_S)

    def enter(self, running: Running) -> None:
        self.running[running.request.id] = running
        self.prompts += running.request.prompt_tokens
        self.started_sum += running.since

    def leave(self, request_id: str) -> Running | None:
        """None: it was retracted."""
        running = self.running.pop(request_id, None)
        if running is not None:
            self.prompts -= running.request.prompt_tokens
            self.started_sum -= running.since
        return running
