"""The core: the structures that every question and event goes through, in C++ behind Cython.

    base        arenas, hashes of blocks, keyed tables, msgpack, pages, steps of long work
    json        request bodies to integer arrays and a few members; JSON that arrives in pieces
    events      batches of engines to events
    zmq         messages off ZMQ sockets, and where they wait
    index       the radix tree of blocks, who holds them, and questions about them
    dump        an index written, and one received, checked and applied
    ledger      live requests, and the load of every rank
    selector    the cost of every rank for a prompt, and the choice
    prompts     prompts that were seen before, by their messages
    relay       bytes between clients and engines
    conductor   publishers of the KV Events standard in the same tree

Each imports from those above it only. Nothing here imports kvd.
"""
