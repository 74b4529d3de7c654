"""The HTTP APIs: each face reads requests and writes answers.

    indexer        Dynamo's standalone KV indexer (docs/faces/indexer.md)
    slot_tracker   Dynamo's slot tracker (docs/faces/slot_tracker.md)
    selection      Dynamo's selection service (docs/faces/selection.md)
    conductor      Mooncake Conductor's indexer API (docs/faces/conductor.md)
    gateway        OpenAI's and Anthropic's APIs in front of engines (docs/gateway.md)
    explain        why a request goes where it goes: POST /explain of every face
    ui             the page at /ui of every face, and what `kvd top` shows
    common         what several faces share: members of bodies, /health, replicas, metrics of ranks

In each face, `routes` has the table of routes and the handlers of the cold ones. `handlers` has the
compiled handlers of the hot ones; the gateway has no such module. `schemas` describes what routes
read and answer, for the OpenAPI document. `registration` (in `selection`: `records` and `members`)
reads what a call or an entry of a fleet file registers.
"""
