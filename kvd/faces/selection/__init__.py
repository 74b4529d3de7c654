"""The selection service's API, as Dynamo serves it (docs/faces/selection.md).

routes                       `selection_routes`: the table of routes
schemas                      what each route reads and answers, for the OpenAPI document
plain                        selections, steps of reservations and loads in their plain form,
                             compiled
choosing                     /select and /select_and_reserve: members of a request to a
                             `SelectRequest`, and its answer
prompts                      the prompt of a request, hashed
reservations                 reservations made and ended by name
workers, records             the catalog of workers: its routes, and records read and written
tuning                       busy thresholds, router modes and policies, changed at run time
inspection                   loads and readiness
members                      members that several routes read
booking_metrics, choice_metrics
                             what /metrics says of reservations and of choices
"""
