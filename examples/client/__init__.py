"""How to ask kvd from Python: three programs to begin with, explained in docs/client.md."""
