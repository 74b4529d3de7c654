"""`python -m examples.demo`: a real daemon, two simulated engines and a router that asks it.

    __main__   flags, signals, the exit code
    daemon     `kvd serve` as a child process
    traffic    the engines registered, the conversations, the live line
    fleet      engines behind one daemon, and the router
    engines    prefix caches that publish KV events
    workload   the conversations
    client     HTTP
    display    what the terminal shows

Nothing here imports kvd: the engines register over HTTP and publish over ZMQ; the router asks
/query for each turn of a conversation, sends the turn to the engine that is cheapest, and checks
the answer against what the engines really hold.
"""
