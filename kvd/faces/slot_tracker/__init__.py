"""The slot tracker's API, as Dynamo serves it (docs/faces/slot_tracker.md).

routes        `routes`: the table of routes and the handlers of cold ones
schemas       descriptions of the routes, for the OpenAPI document
handlers      /add, /prefill_complete, /free, /loads and /potential_loads, compiled
registration  reads the body of a registration, for the route and the fleet file
metrics       metrics of live requests and loads
"""
