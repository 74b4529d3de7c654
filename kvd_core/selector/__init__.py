"""Which rank should serve a prompt.

selector                  `Pool`, `Prompt`: the module that Python uses
settings                  weights and thresholds of a choice
selector.hpp, types.hpp   one look at the index and the ledger; the state of every candidate
cost.hpp                  the cost of a candidate
rows.hpp                  what a look has found, as JSON
choice_counts             sums over choices, for metrics
"""
