"""How `pagegate replay --grow-to` prints a day: a line a figure and a column a policy, or one JSON document."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from rich.console import Console
from rich.table import Table

from api.cli.session import print_record
from gateway.replay.day_trials import DayReport


def print_days(reports: Sequence[DayReport], about: Mapping[str, object], *, as_json: bool) -> None:
    """about: what was played."""
    if as_json:
        print_record("Replay", {**about, "policies": [asdict(each) for each in reports]}, as_json=True)
        return
    table = Table(title=", ".join(f"{name} {what}" for name, what in about.items()))
    table.add_column("figure")
    for each in reports:
        table.add_column(each.policy, justify="right")
    for name in (field.name for field in fields(DayReport) if field.name != "policy"):
        table.add_row(name, *(_text(getattr(each, name)) for each in reports))
    Console().print(table)


def _text(value: float) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
