"""Usage and cost in the formats that other programs read. Sums are the ledger's in every one of them."""
