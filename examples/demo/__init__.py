"""`python -m examples.demo`: a real daemon in front of two simulated engines, at work.

    __main__   flags, signals, the exit code
    daemon     `kvd serve` as a child process
    traffic    the engines, the conversations, the live line
    workload   the conversations
    client     HTTP
    display    what the terminal shows

Nothing here imports kvd. The engines are those of `examples.engine`; kvd asks them what they are,
listens to their KV events and is their gateway. The demo talks to kvd as any client would, and
compares the cached tokens that kvd expected with those that the engine reports.
"""
