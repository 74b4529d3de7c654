"""The HTTP APIs: what requests say, and what is answered.

    indexer        Dynamo's standalone KV indexer (docs/faces/indexer.md)
    slot_tracker   Dynamo's slot tracker (docs/faces/slot_tracker.md)
    selection      Dynamo's selection service (docs/faces/selection.md)
    conductor      Mooncake Conductor's indexer API (docs/faces/conductor.md)
    gateway        OpenAI's and Anthropic's APIs in front of engines (docs/gateway.md)
    explain        why a request goes where it goes: POST /explain of every face
    ui             the page at /ui of every face, and what `kvd top` shows
    common         what several faces share: members of bodies, /health, replicas, metrics of ranks

In each, `routes` is the table of routes with the handlers of cold ones, and `schemas` says what
routes read and answer, for the OpenAPI document. `handlers` has the handlers of hot ones, compiled;
the gateway has no such routes.
"""
