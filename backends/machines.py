"""The machines of a deployment file: how much memory there is where, and what can never stand there side by side. Pure.

topology.py reads them and refuses a file that asks for the impossible; gateway/lifecycle/placement.py decides who
sleeps so that another may wake. A *pool* is memory that engines share: a machine's, or that of one of its GPUs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

_MIB_PER_GIB = 1024

# MiB by pool, such as "box" or "box/gpu0".
Memory = Mapping[str, int]


class Machine(BaseModel):
    """One machine that engines may live on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    memory_gib: float = Field(gt=0, description="For engines: of the machine, or of each of its GPUs if it has some.")
    gpus: int = Field(default=0, ge=0, le=64, description="How many GPUs it has; 0: engines share its main memory.")

    def pools(self) -> Memory:
        names = [f"{self.name}/gpu{number}" for number in range(self.gpus)] or [self.name]
        return dict.fromkeys(names, mib(self.memory_gib))

    def taken(self, memory_gib: float, gpus: Iterable[int]) -> Memory:
        """By an engine with so much on each of these GPUs; of no named one: on all. Raises ValueError for a GPU that it
        does not have.
        """
        for gpu in gpus:
            if gpu >= self.gpus:
                raise ValueError(f"GPU {gpu} is not on the machine {self.name}, which has {self.gpus}")
        names = [f"{self.name}/gpu{number}" for number in gpus] or list(self.pools())
        return dict.fromkeys(names, mib(memory_gib))


@dataclass(frozen=True, slots=True)
class Housed:
    """A model's replicas and pairs with the memory that each takes. awake_min: so many of them never sleep."""

    model: str
    units: Mapping[str, Memory]
    awake_min: int


def mib(gib: float) -> int:
    return round(gib * _MIB_PER_GIB)


def together(parts: Iterable[Memory]) -> dict[str, int]:
    """What several take, by pool."""
    total: dict[str, int] = {}
    for part in parts:
        for pool, taken in part.items():
            total[pool] = total.get(pool, 0) + taken
    return total


def never_fits(machines: Iterable[Machine], models: Iterable[Housed]) -> Iterator[str]:
    """A sentence for each unit that can't be awake even when all sleep that may, with the numbers."""
    room = {pool: size for machine in machines for pool, size in machine.pools().items()}
    housed = list(models)
    for model in housed:
        for name, memory in model.units.items():
            for pool, taken in memory.items():
                others = sum(
                    _least(other, pool, but=name if other is model else None, awake=other.awake_min) for other in housed
                )
                if taken + others > room[pool]:
                    beside = f" beside {others / _MIB_PER_GIB:g} GiB of what never sleeps" if others else ""
                    yield (
                        f"{name} of {model.model} takes {taken / _MIB_PER_GIB:g} GiB{beside}, and {pool} has "
                        f"{room[pool] / _MIB_PER_GIB:g} GiB"
                    )
                    break


def _least(model: Housed, pool: str, *, but: str | None, awake: int) -> int:
    """What the model's units that must be awake take there at least; `but`, one of them, is counted elsewhere."""
    others = sorted(memory.get(pool, 0) for name, memory in model.units.items() if name != but)
    return sum(others[: awake - (but is not None)] if awake > (but is not None) else [])
