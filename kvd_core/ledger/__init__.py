"""The slot accounting: live requests, and the load of every rank.

ledger                   `Ledger`, `Loads`: the module that Python uses
ledger.hpp, types.hpp    one face's ranks, and the requests that run on them
trie.hpp, rank_refs.hpp  live prompts as a trie, and the ranks that pass through its stretches
requests.hpp             live requests by id, age and rank
loads.hpp                what every rank works on, shared by ledgers
rows.pxd                 loads as JSON
verify.hpp               every invariant, checked
"""
