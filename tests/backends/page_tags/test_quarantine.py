from backends.page_tags.quarantine import Quarantine


def test_pages_of_an_aborted_request_are_kept_and_reported_once() -> None:
    quarantine = Quarantine(pages_max=8)
    assert quarantine.abort([5, 3, 5]) == [3, 5]
    assert quarantine.abort([3, 4]) == [4]
    assert len(quarantine) == 3
    assert quarantine.requests_aborted == 2


def test_only_other_pages_may_be_handed_out_again() -> None:
    quarantine = Quarantine(pages_max=8)
    quarantine.abort([2])
    assert quarantine.usable([3, 2, 1]) == [3, 1]
    assert 2 in quarantine
    assert 3 not in quarantine


def test_too_many_pages_end_the_trust_in_the_engine() -> None:
    quarantine = Quarantine(pages_max=2)
    quarantine.abort([1, 2])
    assert not quarantine.overflowing
    quarantine.abort([3])
    assert quarantine.overflowing
