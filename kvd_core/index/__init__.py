"""The index of held blocks by rank and tier, and the matches of prompts in it.

prefix_index                 `PrefixIndex`, `Worker`, `Stream`, `Dump`: the module that Python
                             uses
tree.hpp, chain.hpp, runs.hpp
                             the radix tree; the blocks of its nodes; which ranks hold them
ranksets.hpp, names.hpp      interned sets of holders; engines' own names of blocks
counts.hpp                   second copies and second names, of which few ranks have many
parked_blocks.hpp            blocks that have no place yet
index.hpp, types.hpp         the rules that join the tree, the sets and the names
store.hpp, remove.hpp, retire.hpp, parked.hpp
                             what a store, a removal, a clear and an unknown parent do
sequence.hpp                 blocks by sequence hash
predicted.hpp                blocks that ranks should cache soon, kept beside the events
predictions                  `Predictions`: the same for ranks that send no events
chronicle                    `Chronicle`: the last changes of who holds which block
trace                        why a prompt is cached as far as it is, from the chronicle
branches                     the tree, a level at a time, for people
prompt_stats.hpp             what queries and engines have shown of their prompts
stream.hpp, cache_groups.hpp
                             turn the events of one worker into operations on the index
path.hpp, match.hpp, answer.hpp, tiered_answer.hpp
                             a query: the walk, what it finds, and its answer as JSON
worker.hpp, verify.hpp       a worker and its ranks; a check of every invariant
"""
