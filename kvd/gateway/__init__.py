"""The gateway: sends each client's request to the engine that has most of its prompt cached.

    upstreams   the engines behind the gateway: which there are, which of them serve a model
    following   one of them, followed: where it is, what it is, whether it is well
    upstream    one of them: its state, and the worker it stands for
    tunnels     TLS to engines; the relay sees a plain socket
    dns_names   names whose addresses are engines
    probing     what an engine reports of itself: models, block size, ranks, where its events are
    canary      checks whether an engine's events match what it computes
    requests    what a request asks for: model, prompt, session, limits
    multipart   fields of multipart bodies
    tokens      the prompt's token ids, from the request or from an engine
    chains      which conversation a request continues, where its tokens are not known
    choices     the interface to choose and book an engine, and its form in this process
    remote      the same by other kvds
    remote_kvd  one of those: whether it is up, the engines registered there, steps of bookings
    booking_steps
                sends further steps of bookings to those kvds
    siblings    metrics of other gateway processes
    attempts    retries: the healthy engine, not tried yet, that serves a request next
    pools       two engines for one request: one computes the prompt, another one answers
    forwarding  serves one request: intake, choice, retries and when they end, answering
    intake      what a request asks for: its model, engines that may serve it, its tokens
    answering   what the client is sent, and what happens at the end of its answer
    answers     what an answer tells the gateway: a refusal, a fault, cached tokens
    heads       heads of requests and answers, rewritten for the other side
    exchanges   lets tasks wait for the relay (kvd_core.relay)
    errors      the gateway's own errors, in the form that clients of each API know
    stats       counts the outcomes of requests

kvd.selection chooses, here or in another kvd; every upstream is one of its workers. Bytes of
answers pass from engine to client without Python.
"""
