"""The index of held blocks by rank and tier, and the matches of prompts in it.

prefix_index                 `PrefixIndex`, `Worker`, `Stream`, `Dump`: the module that Python
                             uses
tree.hpp, ranksets.hpp, names.hpp
                             the radix tree; interned sets of holders; engines' own names of
                             blocks
index.hpp, types.hpp         the rules that join the three
store.hpp, remove.hpp, retire.hpp, parked.hpp
                             what a store, a removal, a clear and an unknown parent do
sequence.hpp                 blocks by sequence hash
predicted.hpp                blocks that are thought to be cached, beside events
predictions                  `Predictions`: the same where there are no events
chronicle                    `Chronicle`: the last changes of who holds which block
trace                        why a prompt is cached as far as it is, from the chronicle
branches                     the tree, a level at a time, for people
prompt_stats.hpp             what prompts of both sides have said of themselves
stream.hpp, cache_groups.hpp
                             from the events of one worker to operations
path.hpp, match.hpp, answer.hpp, tiered_answer.hpp
                             a question: the walk, what it finds, and its answer as JSON
worker.hpp, verify.hpp       a worker and its ranks; every invariant, checked
"""
