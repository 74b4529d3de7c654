"""The gateway: clients' requests on their way to the engine that has most of the prompt cached.

    upstreams   the engines behind the gateway: who they are, whether they are well
    tunnels     TLS to engines, for the relay a plain socket
    dns_names   names whose addresses are engines
    probing     what an engine says of itself: models, block size, ranks, where its events are
    canary      does what an engine publishes match what it computes?
    requests    what a request wants: model, prompt, session, limits
    multipart   fields of multipart bodies
    tokens      the prompt's token ids, from the request or from an engine
    chains      which conversation a request continues, where its tokens are not known
    choices     who chooses and books: the interface, and this process
    remote      choices of other kvds, at which engines are registered
    booking_steps
                further steps of bookings on their way to those kvds
    siblings    other gateway processes, asked what they count
    attempts    retries: which healthy engine, not tried yet, serves a request next
    pools       two engines for one request: one computes the prompt, another one answers
    forwarding  one request from its head to its end: choice, retries and when they end, answer
    answers     what an engine's answer says beside its content: a refusal, a fault, cached tokens
    heads       heads of requests and answers, as they go on to the other side
    exchanges   the relay (kvd_core.relay) for tasks that wait
    errors      the gateway's own errors, in the form that clients of each API know
    stats       outcomes of requests, counted

Choices are those of kvd.selection, here or elsewhere, of which every upstream is a worker. Bytes of
answers pass from engine to client without Python.
"""
