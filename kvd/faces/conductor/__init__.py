"""The conductor's API, as Mooncake documents it (docs/faces/conductor.md).

routes     `routes`: the table of routes and their handlers; reasons of failures
schemas    what each route reads and answers, for the OpenAPI document
plain      /query and /query_by_hash in their plain form, compiled
members    members of bodies that are kept, judged for JSON and msgpack alike
msgpack    the msgpack dialect of the same routes
listings   /services, /global_view and metrics
"""
