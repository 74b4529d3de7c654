"""Tests of the client without a socket: calls, attempts, answers."""
