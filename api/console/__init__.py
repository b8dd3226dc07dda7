"""What is no dialect, under /console/v1: usage, requests, invariants, capacity. Thin: the work is in billing."""
