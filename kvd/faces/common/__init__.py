"""Shared by several faces.

bodies         members of bodies, parameters of queries and path segments, read strictly
reader         members of bodies for hot handlers, compiled; `bodies` words what is wrong with them
monitoring     /health and /metrics
diagnosis      /diagnose
slices         long answers, written piece by piece
schemas        what faces say of their routes: words for JSON schemas, routes of several faces
openapi        the OpenAPI document of a face, made from that and its routes
rank_metrics   the load of each rank in /metrics, where there are few enough of them
replica_sync   the routes that list, add and remove replicas
"""
