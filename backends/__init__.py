"""Engines behind one contract, which is SGLang's own HTTP surface.

Knows nothing of tenants or money: an engine sees token ids, sampling fields and an opaque cache scope.
"""
