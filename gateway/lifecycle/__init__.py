"""Engines that sleep and wake: which may, whose memory that needs, and who carries it out."""
