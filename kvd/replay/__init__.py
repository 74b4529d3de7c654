"""Replays recorded requests in simulated time, under any policy, for `kvd replay`.

    traffic <─ mooncake, decision_log      which requests, when
      │
    simulation ── engine ── cache          which engine works next; an engine; its blocks
      │  │
      │  └ routers ── policies             kvd_core's index, ledger and pool; late events, several
      v                                    routers
    figures ── table, plot                 the results; as Markdown, as SVG
    runs, progress                         in several processes, with a bar

No daemon uses anything here. Only the bar reads a clock; all other times are simulated seconds.

    recording                  `RecordedRequest`, `Recording`: the content of either form of file;
                               `ReplayError`
    traffic                    `Traffic`: which requests are replayed, and how they are changed
    mooncake, decision_log     the two forms of file
    cache, engine              a prefix cache as vLLM keeps it; first come first served, one prefill
                               at a time, a batch that decodes
    simulation                 `SimulatedFleet`, `replay`: arrivals and engines' work, by time
    routers, policies          `Routing`: one or several of kvd's selectors, with events at once or
                               late
    figures, table, plot       `Figures`, `measure`; tables in Markdown; bars as SVG
    runs, progress             `Case`, `run_all`; a bar on standard error
"""
