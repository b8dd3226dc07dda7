"""Accounts, keys and live meters: who is asking, and how much of it at once."""
