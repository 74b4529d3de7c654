"""HTTP/1.1 on sockets: requests in, responses out, for any table of routes.

messages, routes             `Request`, `Response`, `Route`: what faces and servers exchange
front, server, tls           the server of a face's plain addresses, what it shares with TLS,
                             and TLS
fast_path, plain_head.hpp    connections between two requests, and the common request answered
                             in place, compiled
idle_poll                    serves those connections, and a gateway's relay, between two passes
                             of trio, while nothing else is to be done
busy_wait                    stays awake for the next request, where that costs less than sleep,
                             compiled
hot                          the handler of a hot route, compiled: `fast_path` and `connection` call
                             the same one
connection, transport        one client: its requests one after the other; its stream, phases
                             and deadlines
relayed, untasked            a request whose answer another part writes; it needs no task for as
                             long as it waits for nothing but that
head, body                   bytes to a request's head and body
render, writer, answer, errors
                             a response to bytes; a handler's outcome or failure to a response
table                        the route of a raw path, found once for each request
app, cold, asgi, middleware  the Quart application of the cold routes, when it is loaded, how a
                             request gets there, is counted and logged
auth, permits, pages         tokens, hosts and origins: is this request allowed, and what may
                             pages of other origins read
context                      what every connection of a face shares
access, limits, options, listeners, accept, certificates
                             the access log; bounds and counters; sockets and files
"""
