"""The KV indexer's API, as Dynamo's standalone indexer serves it (docs/faces/indexer.md).

routes        `routes`: the table of routes and the handlers of cold ones; its metrics
schemas       descriptions of the routes, for the OpenAPI document
handlers      /query, /query_by_hash and /query_tiered_by_hash, compiled
registration  reads the body of a registration, for the route and the fleet file
workers       /workers: the rows of listings, and the members that show a stream
"""
