"""Batches of engines to events, without a Python object for any of them.

events.hpp                   a batch from its bytes to a sink, in slices
reader.hpp, types.hpp, scratch.hpp
                             one event in every form that engines send; the vocabulary; where
                             events wait for their rank
block_identity.hpp           salts and media that distinguish blocks of equal tokens
publisher.hpp                the publisher that a batch names
split                        where the events of a payload are
decoder                      the decoder's view as plain values, for tests and tools
"""
