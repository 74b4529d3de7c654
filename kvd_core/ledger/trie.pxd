# cython: language_level=3
"""The trie of live prompts (`ledger/trie.hpp`), and its verifier."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from kvd_core.base.arena cimport Visitor


cdef extern from "ledger/trie.hpp" namespace "kvd::ledger" nogil:
    ctypedef uint32_t LoadedRankId  # dense, reused after removal
    ctypedef uint32_t NodeId
    uint32_t kNone                 # no rank, no request
    NodeId kRoot

    cppclass CRankRef "kvd::ledger::RankRef":
        LoadedRankId rank

    cppclass CRankRefs "kvd::ledger::RankRefs":
        uint32_t size()
        const CRankRef* begin()

    cppclass CTrieNode "kvd::ledger::TrieNode":
        uint32_t len               # blocks
        NodeId parent
        CRankRefs ranks            # the ranks that pass through

    cppclass CPathPosition "kvd::ledger::Trie::PathPosition":
        NodeId node                # the deepest node that has some of the prompt
        uint32_t inside            # how many of that node's blocks are the prompt's
        size_t depth               # all blocks of the prompt that the trie has

    cppclass CTrie "kvd::ledger::Trie":
        const CTrieNode& node(NodeId)
        uint32_t node_count()
        uint64_t block_count()
        uint64_t rank_ref_count()
        size_t bytes()
        CPathPosition find(const uint64_t*, size_t)
        uint64_t rank_refs_needed(const CPathPosition&, size_t)
        # Writes the hashes of a prompt that ends in a node and has this many blocks.
        void copy_path(NodeId, size_t, char*)
        # Returns the prompt's last node and sets the last argument to the blocks new for the rank.
        # Without memory it changes nothing.
        NodeId insert(const CPathPosition&, const uint64_t*, size_t, LoadedRankId, size_t&) except +
        # Both visit (blocks, weight) of the nodes that only this request of the rank passes
        # through, from its end upwards.
        void erase[State](NodeId, LoadedRankId, const Visitor[State]&)
        void weigh[State](NodeId, LoadedRankId, double, const Visitor[State]&)

cdef extern from "ledger/verify.hpp" namespace "kvd::ledger" nogil:
    cppclass CHeld "kvd::ledger::TrieVerifier::Held":
        uint64_t blocks
        double weight

    cppclass CTrieVerifier "kvd::ledger::TrieVerifier":
        CTrieVerifier(const CTrie&) except +
        void note(NodeId end, LoadedRankId, uint32_t blocks) except +  # for each request
        void run() except +
        CHeld held(LoadedRankId)         # over the nodes that the rank passes through
