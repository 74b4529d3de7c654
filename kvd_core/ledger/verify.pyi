"""Has nothing for Python: the ledger calls it from Cython."""
