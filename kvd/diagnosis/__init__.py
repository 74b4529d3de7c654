"""Finds out why prompts do not match: checks the chain from the engines to the choice.

    parts of the daemon ──── gathering ──> Evidence ── chain ──> Findings ──> GET /diagnose
    engines, from outside ── probes ─────────┘           │
                     engines, upstreams, events, identity, capacity, questions, choices

    doctor      `Doctor`: one diagnosis, from evidence to findings
    evidence    what is known at one moment, as plain values
    gathering   evidence from the parts of the daemon
    chain       the checks of all links, in their order
    engines     does the engine answer, does it speak ZeroMQ, does it publish KV events?
    upstreams   do engines behind the gateway serve?
    events      do events arrive whole, and do they fit the registration?
    identity    are the models and tenants that are asked for registered, with all ranks?
    capacity    is there room for what engines cache?
    questions   do questions match what is held: salts, adapters, tokens?
    choices     does every worker get requests, do bookings end, do replicas and clocks agree?
    findings    the names, severities and remedies of all findings
    growth      by how much counters have grown in the last minutes
    probes      probes engines from outside, within bounds: the first bytes of ZeroMQ

Checks are functions from evidence to findings, without I/O or a clock.
"""
