"""The slot accounting: live requests, and the load of every rank.

ledger                   `Ledger`, `Loads`: the module that Python uses
book.pxd                 one face's ranks, and the requests that run on them
requests.pxd             live requests by id, age and rank
loads.pxd                the load of every rank, which ledgers share
types.pxd, bounds.hpp    structs; the most that a ledger holds
rows.pxd                 loads as JSON
journal                  `Journal`: each step of requests on its way to a file, and back
records.pxd, record_buffer.hpp
                         the records of a journal, and the buffer that they wait in
verify                   a check of every invariant; verify.hpp checks those of the trie
trie.hpp, rank_refs.hpp  live prompts as a trie, and the ranks that pass through its nodes;
                         trie.pxd declares them for Cython

The accounting is Cython: book.pxd, requests.pxd, loads.pxd and rows.pxd hold inline functions. The
trie is a container, in C++.
"""
