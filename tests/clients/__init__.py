"""The clients that people use, against `kvd gateway` in front of simulated engines.

`make clients` runs them from an environment of its own. Without one of the clients its tests are
skipped, and say which extra has it. Clients run in threads: the engines are in the test's own loop.
"""
