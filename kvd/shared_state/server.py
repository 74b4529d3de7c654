"""The client of the server: coredis, which runs on trio, and knows sentinels and clusters.

It takes 18 MB of memory, so this room is imported where an address is set.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from coredis import Redis, RedisCluster, Sentinel
from coredis.connection import TCPLocation
from coredis.exceptions import RedisError
from coredis.retry import NoRetryPolicy

from kvd.shared_state.keys import Keys
from kvd.wire.state_address import StateServer

# It writes tracebacks of what it raises, too; who catches that says it in a line.
logging.getLogger("coredis").setLevel(logging.CRITICAL + 1)

Client = Redis[bytes] | RedisCluster[bytes]

# Errors of a server, or of the way to it.
ServerError = (OSError, RedisError)

CONNECT_S = 2.0  # that a server may take to accept a connection
ANSWER = 0.3  # leases that it may take to answer; longer than it is asked to wait for news
WRITE_MISSING = "for i = 1, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end"


@asynccontextmanager
async def connected(server: StateServer) -> AsyncIterator[Client]:
    """Gives a client of the server.

    What goes wrong with it raises a ServerError, perhaps in a group.
    """
    address = server.address
    times = {"stream_timeout": ANSWER * server.lease_s, "connect_timeout": CONNECT_S}
    options: dict[str, Any] = {
        "username": address.user,
        "password": server.password,
        **times,
    }
    if address.tls:
        options["ssl_context"] = ssl.create_default_context(cafile=server.ca_file)
    async with AsyncExitStack() as stack:
        client: Client
        if address.sentinel_name is not None:
            sentinels = Sentinel(
                [TCPLocation(*each) for each in address.servers],
                sentinel_kwargs=times,
                retry_policy=NoRetryPolicy(),
                db=address.database,
                **options,
            )
            await stack.enter_async_context(sentinels)
            client = sentinels.primary_for(address.sentinel_name)
        elif address.is_cluster:
            nodes = [TCPLocation(*each) for each in address.servers]
            client = RedisCluster(startup_nodes=nodes, retry_policy=NoRetryPolicy(), **options)
        else:
            (host, port), *_ = address.servers
            client = Redis(host, port, address.database, retry_policy=NoRetryPolicy(), **options)
        yield await stack.enter_async_context(client)


async def time_of(client: Client, keys: Keys) -> float:
    """Returns the server's clock in seconds; raises what the client raises.

    A script, because a cluster's client sends a command to where its keys are, and TIME has none.
    """
    answer: Any = await client.eval("return redis.call('TIME')", [keys.ops], [])
    seconds, micros = answer
    return int(seconds) + int(micros) / 1e6


async def write_missing(client: Client, key: str, rows: Mapping[str, bytes]) -> None:
    """Sets the fields that a hash does not have, and leaves the others as they are.

    A script, because no command does that for several fields. Raises what the client raises.
    """
    await client.eval(WRITE_MISSING, [key], [part for row in rows.items() for part in row])
