"""Double entry over what was used and what was paid: append-only, every transaction sums to zero."""
