"""HTTP/1.1 on sockets: requests in, responses out, for any table of routes.

messages, routes             `Request`, `Response`, `Route`: what faces and servers exchange
front, server, tls           the server of a face's addresses without TLS; its base, which accepts
                             connections and ends them; the server over TLS
fast_path, plain_head.hpp    keeps connections between two requests, and answers common requests
                             on the spot; compiled
idle_poll, rows              serves those connections, and a gateway's relay, between two passes
                             of trio, while no task can run; the turns that they take; compiled
busy_wait                    waits awake for the next request where that costs less than sleeping;
                             compiled
hot                          the handler of a hot route; compiled; `fast_path` and `connection`
                             call the same one
connection, transport        serves one client's requests in turn; its stream, phases and deadlines
scanning                     scans long bodies in steps
serving                      calls the handlers of hot routes; what a listener's connections share
relayed, untasked            a request whose answer another part writes; coroutines that need no
                             task while they wait for callbacks only
head, body                   turn bytes into a request's head and body
head_reader                  reads a head from its connection
render, writer, answer, errors
                             turn a response into bytes, a handler's outcome into a response
table                        finds the route of a raw path, once for each request
app, cold, asgi, middleware  the Quart application of the cold routes; loads it when it is first
                             needed; passes requests to it; bounds, counts and logs them
auth, permits, pages         tokens, hosts and origins: whether a request is allowed, and what
                             pages of other origins may read
context                      what all connections of a face share
access, limits, options, listeners, accept, certificates
                             the access log; bounds and counters; listening sockets and TLS files
"""
