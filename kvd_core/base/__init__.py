"""The foundation of all of the core.

arena.hpp, pages.hpp   storage by dense ids that never moves; memory in mappings of its own
numbers.hpp            numbers by dense ids, of which many have none
page_buffer.hpp        a vector that grows without copying
keyed.hpp              the hash of tables whose keys outsiders choose
arena.pxd              arenas, probe tables and keyed hashes for Cython's structs
served.pxd             what a turn of a pollable has come to
visitor.hpp            a visitor for callers without lambdas
hash.hpp, hashing      hashes of blocks, in C++ and for Python
msgpack.hpp            a reading cursor over msgpack
steps.hpp              the budget of a slice of long work
chains.hpp             the skeleton of trees of blocks: chains, descend, split, merge
recent                 digests of a stream's last batches
rendering.pxd          bytes that are written in place, for answers
draws                  random numbers in bulk
sampling               samples the requests that observers are notified of
"""
