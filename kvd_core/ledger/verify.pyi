"""Offers nothing to Python: the ledger calls it from Cython."""
