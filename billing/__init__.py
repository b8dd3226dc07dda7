"""Prices, usage and credit, in integers: what was used, what it costs, and that it is recorded once."""
