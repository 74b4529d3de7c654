"""The selection service's API, as Dynamo serves it (docs/faces/selection.md).

routes                       `selection_routes`: the table of routes
schemas                      what each route reads and answers, for the OpenAPI document
handlers                     selections, the end of reservations and of their prefill, loads,
                             overlaps; prompts of bodies; compiled
choosing                     unusual members of a selection to a `SelectRequest`, and its wait
prompts                      what is wrong with a prompt, and one that has waited
reservations                 reservations made by name, shown, and given output blocks
workers, records             the catalog of workers: its routes, and records read and written
tuning                       busy thresholds, router modes and policies, changed at run time
members                      members that several routes read
regret                       what was expected of choices, and what came of them
booking_metrics, choice_metrics, speed_metrics
                             what /metrics says of reservations, choices and speeds of ranks
"""
