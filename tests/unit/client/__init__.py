"""The client without a socket: calls, attempts, answers."""
