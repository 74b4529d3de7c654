"""Recorded requests replayed in simulated time, under any policy: what `kvd replay` runs.

    traffic <─ mooncake, decision_log      which requests, when
      │
    simulation ── engine ── cache          who works next; an engine; its blocks
      │  │
      │  └ routers ── policies             kvd_core's index, ledger and pool; late events, several
      v                                    routers
    figures ── table, plot                 what came out; as Markdown, as SVG
    runs, progress                         in several processes, with a bar

Nothing here is used by a daemon. No clock is read but the bar's; all else is simulated seconds.

    recording                  `Request`, `Recording`: what any form of file holds; `ReplayError`
    traffic                    `Traffic`: which of them are replayed, and what is made of them
    mooncake, decision_log     the two forms of file
    cache, engine              a prefix cache as vLLM keeps it; first come first served, one prefill
                               at a time, a batch that decodes
    simulation                 `Fleet`, `replay`: arrivals and what is due, in order of time
    routers, policies          `Routing`: kvd's selector, alone or several, heard at once or late
    figures, table, plot       `Figures`, `measure`; tables in Markdown; bars as SVG
    runs, progress             `Case`, `run_all`; a bar on standard error
"""
