"""The slot tracker's API, as Dynamo serves it (docs/faces/slot_tracker.md).

routes    `routes`: the table of routes and their handlers
schemas   what each route reads and answers, for the OpenAPI document
plain     /add, /free and the other hot routes in their plain form, compiled
metrics   what /metrics says of live requests and loads
"""
