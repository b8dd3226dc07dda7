"""What all tests share. Hypothesis draws the same examples everywhere and judges no example by its time: a busy machine
is no failure.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("pagegate", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("pagegate")
