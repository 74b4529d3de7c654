"""Publishers of the KV Events standard, in the index that workers share.

conductor                    `Conductor`, `Source`, `EngineEvents`: the module that Python uses
conductor.hpp, types.hpp, sources.hpp
                             bounds; publishers, and the ranks that their blocks count for
events.hpp, meaning.hpp, waiting.hpp, waiters.hpp
                             what an event does; which block a hash means; blocks that have no
                             place yet, and what they wait for
engine_events.hpp            engines' own events for a publisher
holdings.hpp                 what every instance holds of a prompt, as JSON
kept_holdings                what publishers hold, kept for the next process
packed, repack               msgpack bodies of requests; JSON payloads to msgpack
"""
