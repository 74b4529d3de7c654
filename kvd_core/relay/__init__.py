"""Answers of engines on their way to clients: the gateway moves their bytes without Python.

framing.hpp   an answer's head, the end of its body, the first event of a stream
tail.hpp      the end of a payload that has passed
relay.hpp     connections to engines, exchanges, frames and back-pressure, on one epoll set
relay         the same for Python: `Relay`, which says when an answer begins and how it ended
"""
