"""What several faces share.

bodies         members of bodies, parameters of queries and path segments, read strictly
reader         members of bodies for hot handlers, compiled; `bodies` words what is wrong with them
monitoring     /health and /metrics
rank_metrics   the load of each rank in /metrics, where there are few enough of them
replica_sync   the routes that list, add and remove replicas
"""
