"""Slow, obvious models that the fast code is compared with."""
