# distutils: language = c++
"""The tree of a prefix index, a level at a time, and what each rank of a worker holds in all.

`index/branches.hpp` has the rules. Nothing here changes an index.
"""

from collections import namedtuple

from cython.operator cimport dereference as deref
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from kvd_core.index.prefix_index cimport (
    CIndex,
    PrefixIndex,
    RankId,
    Worker,
    kNone,
    kTierLayers,
)


cdef extern from "index/branches.hpp" namespace "kvd" nogil:
    cppclass CHolding "kvd::Holding":
        uint32_t tier
        RankId rank
        uint32_t blocks

    cppclass CBranch "kvd::Branch":
        uint32_t node
        uint64_t first
        uint32_t blocks
        uint32_t children
        cbool whole
        vector[CHolding] holders

    cppclass CBranches "kvd::Branches":
        CBranches(const CIndex&)
        cbool has(uint32_t, uint64_t)
        cbool is_child(uint32_t, uint32_t)
        cbool list(uint32_t, uint32_t, size_t, vector[CBranch]&) except +

    # Counters of a rank that prefix_index.pxd does not declare.
    uint64_t held_on "kvd::held_on"(const CIndex&, RankId, uint32_t)

ROOT = 0  # the node above all chains

# A chain of blocks below another: its node and the local hash of its first block name it.
# `holders` are (tier, worker id, dp rank, blocks of the chain), by tier, most blocks first; worker
# and rank are None for publishers' blocks that count for no worker. If it is not `whole`, some
# holders are missing.
Branch = namedtuple("Branch", ("node", "first", "blocks", "children", "whole", "holders"))


def branches(PrefixIndex index not None, above, after, size_t limit):
    """Lists at most `limit` chains below one, newest first, and returns whether there are more.

    `above` and `after` name chains by (node, first hash). `above` is the chain that the listed ones
    continue, None for the beginning of prompts; `after` is the last chain of the page before, None
    for the first page. LookupError if one of them does not exist any more.
    """
    cdef CBranches* walk = new CBranches(deref(index.c))
    cdef vector[CBranch] found
    cdef Worker worker
    cdef cbool more
    try:
        for position in (above, after):
            if position is not None and not walk.has(position[0], position[1]):
                raise LookupError(position)
        at = ROOT if above is None else above[0]
        behind = kNone if after is None else after[0]
        if after is not None and not walk.is_child(behind, at):
            raise LookupError(after)
        more = walk.list(at, behind, limit, found)
    finally:
        del walk
    owners = {kNone: (None, None)}
    for worker in index.workers:
        for entry in worker.c.ranks:
            owners[entry.second] = (worker.worker_id, entry.first)
    rows = [
        Branch(
            each.node,
            each.first,
            each.blocks,
            each.children,
            each.whole,
            [
                (one.tier, *owners.get(one.rank, (None, None)), one.blocks)
                for one in each.holders
            ],
        )
        for each in found
    ]
    return rows, more


def holdings(Worker worker not None):
    """Returns how many blocks each rank of a worker holds, by dp rank, as a tuple by tier."""
    if worker.index is None:
        return {}
    return {
        entry.first: tuple([
            held_on(deref(worker.index.c), entry.second, tier) for tier in range(kTierLayers)
        ])
        for entry in worker.c.ranks
    }
