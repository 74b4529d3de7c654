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
    events      do they arrive whole, and can they be used as registered?
    identity    are model, tenant and ranks those that are asked for?
    capacity    is there room to hold what they cache?
    questions   do questions match what is held: salts, adapters, tokens?
    choices     does every worker get requests, do bookings end, do replicas and clocks agree?
    findings    the names, severities and remedies of all that can be found
    growth      how far counters have grown in the last minutes
    probes      engines probed from outside, within bounds: the first bytes of ZeroMQ

Checks are functions from evidence to findings: they ask nobody and know no clock.
"""
