"""The KV indexer's API, as Dynamo's standalone indexer serves it (docs/faces/indexer.md).

routes    `routes`: the table of routes and their handlers; its metrics
schemas   what each route reads and answers, for the OpenAPI document
plain     /query and /query_by_hash in their plain form, compiled
workers   /workers: the rows of listings, and the members that show a stream
dumps     /dump: the index in pieces, in both forms
"""
