"""What tests of several folders share. Read here before you write a helper of your own.

Daemons and other processes:

    running          a kvd that several tests of one module share
    asking           `kvd serve` with four faces, each on three kinds of address, and raw requests
    kvds             `kvd serve` as a process that tests kill and start again, and requests to it
    reloading        a kvd whose file of settings is read again while it runs
    other_versions   a daemon of another version, for the commands that ask one
    patients         a daemon to be diagnosed, and engines around it, with or without faults
    pictured         a fleet for the page at /ui to show
    state_servers    Redis or Valkey servers: started, stopped, frozen, emptied; and sentinels
    processes, forking
                     start, wait for and stop processes; fork them, which saves their imports
    commands         runs commands of kvd that end by themselves
    unit_sandbox     runs a command under restrictions of systemd/kvd.service

Parts of a daemon in the test's own process:

    serving          a front on loopback, and a client that sends raw bytes and parses replies
    publishing       a conductor with publishers around it
    selecting        selections, with listeners that read nothing and a clock set by hand
    held_selections  selections that wait because all ranks are busy, and their callers
    recovering       an indexer that recovers from peers, or that peers recover from
    replicating      a process on the replica plane
    listening, applying, batch_sinks
                     a listener under test; batches without a listener; what receives them
    idle_listeners, registrations
                     stand for listeners that receive nothing, and for an empty registry
    agreement        checks that registry, state and listener tasks agree
    gateways, inner_gateways, relaying
                     engines and a gateway in front of them; a gateway's parts; its relay alone

Counterparts, honest and hostile:

    engines, storing_engines
                     simulated engines that publish events; one that stores the same few blocks
    zmtp_fakes, replay_servers
                     publishers that misbehave; replay servers, some of which misbehave
    gateway_load     engines that can be killed and stopped, and clients that keep a gateway busy
    dropping, narrow, resolving
                     a proxy that loses answers; a client that stops reading; a resolver of names
    http_client      the client with which tests ask daemons
    twins            one fleet three times, one of them in Dynamo's selection service

Inputs, and models beside the fast code:

    all_routes       the routes of every face, made without a daemon
    bodies, indexer_bodies, slot_bodies, selection_bodies, json_bodies
                     bodies that routes refuse: on any route, on those of a face; random ones
    index_pairs, ledger_lives
                     an index, or a ledger, and its model, driven alike by random operations
    dumps, traces    dumps of indexes, written and read back; a small trace in Mooncake's form
    hashes           hashes of blocks, as compiled code takes them

Readers and checks:

    documented       answers are as the face's OpenAPI document says
    exposition, promql
                     read Prometheus' text format strictly; the series that an expression asks for
    loglines         collects the log lines of a test
    collecting       checks what is freed without Python's collector
    cancelling       cancels an operation at its first, second, ... checkpoint
    chances          random draws come up as often as they should
    descriptors, ports
                     counts open descriptors; ports that no other test run gets
    little_memory, full_disks
                     leave the process little memory, or little room in its files
    budget, tiers    scales random tests; holds tests to the rules of their folder
"""
