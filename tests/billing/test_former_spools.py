"""What workers left that are no more is settled, in SQL, and gone; what a process still owns is left alone."""

from pathlib import Path

from billing.former_spools import FormerSpools
from billing.metering import Metering
from billing.price_book import PriceBook
from billing.records import encode_progress
from billing.settings import BillingSettings
from billing.spool import Spool
from billing.store import UsageStore
from billing.usage import TokenUsage
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, facts, price, record
from tests.tenancy.clock import SettableClock


async def test_ended_and_open_requests_of_a_former_worker_come_to_sql(
    database: Database, price_book: PriceBook, tmp_path: Path, clock: SettableClock
) -> None:
    former, owned = tmp_path / "spool-3", tmp_path / "spool-2"
    left = Spool(former)
    metering = Metering(left, database, price_book, clock=clock)
    for name in ("ended", "open"):
        metering.begin(facts(name))
    await metering.finish(record("ended"), price())
    left.append(encode_progress("open", TokenUsage(10, 0, 7, 0), 1_500))
    left.close()
    mine = Spool(owned)
    spools = FormerSpools(lambda: sorted(tmp_path.glob("spool-*")), database, BillingSettings(), clock=clock)
    assert await spools.settle() == 1
    assert (former.exists(), owned.exists()) == (False, True)
    events = [UsageStore(database).request_record(ACCOUNT, name) for name in ("ended", "open")]
    assert [(event.outcome, event.completion_tokens) for event in events] == [("finished", 100), ("cancelled", 7)]
    mine.close()
    assert await spools.settle() == 1
    assert await spools.settle() == 0


async def test_a_worker_that_stays_away_is_settled_at_the_second_look_and_finds_its_folder_again(
    database: Database, price_book: PriceBook, tmp_path: Path, clock: SettableClock
) -> None:
    of_now = [tmp_path / "spool", tmp_path / "spool-2", tmp_path / "spool-3"]
    died, owned = Spool(of_now[0]), Spool(of_now[1])  # the third has not been started yet
    owner = died.owner
    metering = Metering(died, database, price_book, clock=clock)
    for name in ("ended", "open"):
        metering.begin(facts(name))
    await metering.finish(record("ended"), price())
    spools = FormerSpools(list, database, BillingSettings(), of_now=of_now, clock=clock)
    assert [await spools.settle_absent() for _look in range(3)] == [0, 0, 0]  # it is there
    died.close()
    assert await spools.settle_absent() == 0  # perhaps it is being started again
    assert await spools.settle_absent() == 1
    outcomes = [UsageStore(database).request_record(ACCOUNT, name).outcome for name in ("ended", "open")]
    assert outcomes == ["finished", "cancelled"]
    back = Spool(of_now[0])
    assert back.owner == owner
    assert [await spools.settle_absent() for _look in range(3)] == [0, 0, 0]
    assert not of_now[2].exists()
    for spool in (back, owned):
        spool.close()
