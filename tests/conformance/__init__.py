"""Scenarios written as data (`FORMAT.md`), and the runner that plays them to a live server.

pytest plays them to kvd; `python -m tests.conformance` plays them to any server.
"""
