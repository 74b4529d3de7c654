"""Slow, obvious models with which tests compare the fast code."""
