"""The selection service's API, as Dynamo serves it (docs/faces/selection.md).

routes                       `selection_routes`: the table of routes
schemas                      descriptions of the routes, for the OpenAPI document
handlers                     hot handlers, compiled: selections, steps of reservations, loads,
                             overlaps; the reader of prompts
choosing                     reads unusual members of a selection, and waits for its choice
prompts                      failures of prompts; matching a prompt again after a wait
reservations                 routes that book on a chosen rank, show a booking, add output blocks
workers, records             the catalog of workers: its routes; reading and writing records
tuning                       busy thresholds, router modes and policies, changed at run time
members                      members that several routes read
regret                       expected outcomes of choices beside the reported ones
booking_metrics, choice_metrics, speed_metrics
                             metrics of reservations, of choices and of the speeds of ranks
"""
