"""The conductor's API, as Mooncake documents it (docs/faces/conductor.md).

routes        `routes`: the table of routes and the handlers of cold ones; reasons of failures
schemas       descriptions of the routes, for the OpenAPI document
handlers      /query and /query_by_hash in JSON, compiled
registration  reads the bodies of registrations in JSON, for the routes and the fleet file
members       reads members of bodies in JSON; failures and checks for both dialects
msgpack       the msgpack dialect of the same routes
listings      /services, /global_view and metrics
"""
