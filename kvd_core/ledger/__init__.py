"""The slot accounting: live requests, and the load of every rank.

ledger                   `Ledger`, `Loads`: the module that Python uses
book.pxd                 one face's ranks, and the requests that run on them
requests.pxd             live requests by id, age and rank
loads.pxd                what every rank works on, shared by ledgers
types.pxd, bounds.hpp    structs; what a ledger holds at most
rows.pxd                 loads as JSON
journal                  `Journal`: each step of requests on its way to a file, and back
records.pxd, record_buffer.hpp
                         what it is made of
verify                   every invariant, checked; verify.hpp those of the trie
trie.hpp, rank_refs.hpp  live prompts as a trie, and the ranks that pass through its stretches;
                         trie.pxd declares them for Cython

What accounts is Cython: book.pxd, requests.pxd, loads.pxd and rows.pxd hold inline functions. The
trie is a container, in C++.
"""
