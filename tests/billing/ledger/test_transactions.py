"""A transaction sums to zero, or it is none."""

import pytest

from billing.ledger.transactions import Entry, Transaction, TransactionKind, wallet_of
from tests.billing.builders import ACCOUNT


@pytest.mark.parametrize(
    "entries",
    [
        (),
        (Entry(wallet_of(ACCOUNT), 1),),
        (Entry(wallet_of(ACCOUNT), 1), Entry(wallet_of(ACCOUNT), -1)),
    ],
)
def test_a_transaction_that_is_none_can_not_be_made(entries: tuple[Entry, ...]) -> None:
    with pytest.raises(AssertionError):
        Transaction("top-up:x", TransactionKind.TOP_UP, ACCOUNT, 1, entries)
