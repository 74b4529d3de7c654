"""Decodes engines' batches into events, without a Python object for any event.

events.hpp                   decodes a batch for a sink, in slices
reader.hpp, members.hpp      reads one event, in every form that engines send; the names of its
                             members, and where array events have them
types.hpp, scratch.hpp       the decoder's types; memory where events wait for their rank
block_identity.hpp           reads salts, images and sounds that distinguish blocks of equal tokens
publisher.hpp                finds the publisher that a batch names
split                        finds the events of a payload without reading them
decoder                      decodes a batch into plain Python values, for tests and tools
"""
