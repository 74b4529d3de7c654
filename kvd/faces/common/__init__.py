"""Parts that several faces share.

bodies         members of bodies, parameters of queries and path segments, read strictly
reader         members of bodies for hot handlers, compiled; `bodies` writes the error messages
monitoring     /health and /metrics
diagnosis      /diagnose
slices         long answers, written piece by piece
paths          paths of the routes that every face has
schemas        helpers for JSON schemas, and what describes a route
every_face     descriptions of the routes that every face has, and of those about replicas
openapi        builds the OpenAPI document of a face from its routes and their descriptions
rank_metrics   the load of each rank in /metrics, while there are few enough ranks
replica_sync   the routes that list, add and remove replicas
registration   reads the body of a replica's registration, for the route and the fleet file
"""
