"""Chooses the rank that should serve a prompt.

selector              `Pool`, `Prompt`: the module that Python uses
settings              weights and thresholds of a choice
choice.pxd            which candidates may be chosen, and which is; the modes
cost.pxd              the cost of a candidate
rows.pxd              the findings of a match as JSON
pool.hpp, types.hpp   the findings of the index; the state of every candidate; pool.pxd and
                      types.pxd declare them for Cython
loads.pxd             the findings of the ledger
choice_stats          sums over choices, for metrics

What people change is Cython, what walks trees is C++. choice.pxd, cost.pxd, loads.pxd and rows.pxd
hold inline functions, as C++ headers do: a pass over the candidates calls nothing.
"""
