"""Engines that wake and sleep: a unit (a replica, or a pair as one) has one state, one owner, and what is wished of it.

states.py says what may follow what, store.py keeps it in SQL, keeper.py carries it out through a driver (driver.py).
"""
