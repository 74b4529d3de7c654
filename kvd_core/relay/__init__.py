"""Answers of engines on their way to clients: the gateway's bytes, moved without Python per chunk.

framing.hpp   the head of an answer, where its body ends, the first event of a stream
tail.hpp      the end of a payload that has passed
relay.hpp     connections to engines, exchanges, frames and back-pressure, on one epoll set
relay         the same for Python: `Relay`, which says when an answer begins and how it ended
"""
