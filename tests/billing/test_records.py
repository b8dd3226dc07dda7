"""Records as bytes: what an earlier version wrote is read as it was meant, a later one's as far as it is known here."""

import orjson

from billing.attribution import Attribution
from billing.rating import rate
from billing.records import OpenRequests, decode_end, encode_begin, encode_end, encode_progress, recovered
from billing.tables import usage_events
from billing.usage import TokenUsage
from tests.billing.builders import facts, price, record


def test_an_end_of_before_there_were_tiers_was_served_at_the_standard_one() -> None:
    end = orjson.loads(encode_end(record(), rate(record().usage, price()), 1))
    assert decode_end(orjson.dumps(end))["tier"] == "standard"
    del end["row"]["tier"], end["row"]["tags"]
    assert decode_end(orjson.dumps(end)) == decode_end(encode_end(record(), rate(record().usage, price()), 1))


def test_whom_and_what_it_is_for_survives_the_gateway() -> None:
    begun = facts(attribution=Attribution("ada", '{"team":"search"}'))
    found = OpenRequests()
    found.see(encode_begin(begun))
    (request,) = found.remaining()
    assert request.facts == begun
    end = decode_end(encode_end(recovered(request, charged=True), rate(record().usage, price()), 1))
    assert (end["end_user"], end["tags"]) == ("ada", '{"team":"search"}')


def test_a_begin_of_before_there_were_tiers_is_recovered_at_the_standard_one() -> None:
    begin = orjson.loads(encode_begin(facts(tier="batch")))
    del begin["facts"]["tier"], begin["facts"]["attribution"]
    found = OpenRequests()
    found.see(orjson.dumps(begin))
    assert found.remaining()[0].facts == facts()


def test_an_end_is_a_whole_row() -> None:
    assert decode_end(encode_end(record(), rate(record().usage, price()), 1)).keys() == set(usage_events.c.keys())


def test_what_a_later_version_has_added_is_passed_by() -> None:
    end = orjson.loads(encode_end(record(), rate(record().usage, price()), 1))
    known = decode_end(orjson.dumps(end))
    end["row"]["colour"] = "red"
    assert decode_end(orjson.dumps(end)) == known

    begun = facts(attribution=Attribution("ada"))
    begin = orjson.loads(encode_begin(begun))
    begin["facts"]["colour"] = begin["facts"]["attribution"]["colour"] = "red"
    progress = orjson.loads(encode_progress(begun.request_id, TokenUsage(10, 1, 7, 2), 5))
    progress["counts"].append(3)
    found = OpenRequests()
    for written in (begin, progress):
        found.see(orjson.dumps(written))
    (request,) = found.remaining()
    assert (request.facts, request.usage) == (begun, TokenUsage(10, 1, 7, 2))
