"""Publishers of the KV Events standard, in the index that workers share.

conductor                    `Conductor`, `Source`, `EngineEvents`: the module that Python uses
conductor.hpp, types.hpp, sources.hpp
                             bounds; publishers, and as whom their blocks count
events.hpp, meaning.hpp, waiting.hpp
                             what an event does; which block a hash means; what has no place
                             yet
engine_events.hpp            engines' own events for a publisher
holdings.hpp                 what every instance holds of a prompt, as JSON
kept_holdings                what publishers hold, for the process that comes next
packed, repack               msgpack bodies of requests; JSON payloads to msgpack
"""
