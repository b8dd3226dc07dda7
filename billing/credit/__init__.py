"""Money held before work begins. protocol.py is what the hold calls; for one process, or for several through SQL."""
