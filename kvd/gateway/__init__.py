"""The gateway: clients' requests on their way to the engine that has most of the prompt cached.

    upstreams   the engines behind the gateway: who they are, whether they are well
    tunnels     TLS to engines, for the relay a plain socket
    dns_names   names whose addresses are engines
    probing     what an engine says of itself: models, block size, ranks, where its events are
    canary      does what an engine publishes match what it computes?
    requests    what a request wants: model, prompt, session, limits
    multipart   fields of multipart bodies
    tokens      the prompt's token ids, from the request or from an engine
    chains      which conversation a request goes on with, where nobody says its tokens
    choices     who chooses and books: this process, or
    remote      kvds elsewhere, which are told of engines, and by
    booking_steps
                what becomes of bookings
    siblings    other gateway processes, asked what they count
    attempts    a request's way from engine to engine: who of the well and untried serves it next
    pools       two engines for one request: one computes the prompt, another one answers
    forwarding  one request: a choice, tries, the answer on its way, the booking's end
    answers     what an engine's answer says beside its content: a refusal, a fault, cached tokens
    heads       heads of requests and answers, as they go on to the other side
    exchanges   the relay (kvd_core.relay) for tasks that wait
    errors      the gateway's own errors, in the form that clients of each API know
    stats       what has become of requests, counted

Choices are those of kvd.selection, here or elsewhere, of which every upstream is a worker. Bytes of
answers pass from engine to client without Python.
"""
