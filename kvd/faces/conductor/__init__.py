"""The conductor's API, as Mooncake documents it (docs/faces/conductor.md).

routes     `routes`: the table of routes and the handlers of cold ones; reasons of failures
schemas    what each route reads and answers, for the OpenAPI document
handlers   /query and /query_by_hash in JSON, compiled
members    members of bodies, judged for JSON and msgpack alike; what is wrong with them
msgpack    the msgpack dialect of the same routes
listings   /services, /global_view and metrics
"""
