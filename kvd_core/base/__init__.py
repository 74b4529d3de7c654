"""The foundation of all of the core.

arena.hpp, pages.hpp   storage by dense ids that never moves; memory in mappings of its own
keyed.hpp              the hash of tables whose keys outsiders choose
arena.pxd              these for structs of Cython
visitor.hpp            a visitor for callers without lambdas
hash.hpp, hashing      hashes of blocks, in C++ and for Python
msgpack.hpp            a reading cursor over msgpack
steps.hpp              how much a slice of long work may still do
chains.hpp             chains of blocks that go on in each other: the way down, split, merge
recent                 digests of a stream's last batches
draws                  random numbers in bulk
sampling               which requests observers get
"""
