"""Connects to the server with coredis, which runs on trio and supports sentinels and clusters.

coredis takes 18 MB of memory, so this module is imported only if an address is set.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from secrets import token_hex
from typing import Any

import trio
from coredis import Redis, RedisCluster, Sentinel
from coredis.connection import TCPLocation
from coredis.exceptions import RedisError
from coredis.retry import NoRetryPolicy

from kvd.shared_state.keys import Keys
from kvd.wire.state_address import StateServer

# coredis logs tracebacks of the errors that it raises; whoever catches these logs them in one line.
logging.getLogger("coredis").setLevel(logging.CRITICAL + 1)

Client = Redis[bytes] | RedisCluster[bytes]

# Errors of the server, or of the network to it.
ServerError = (OSError, RedisError)

CONNECT_S = 2.0  # longest time that the server may take to accept a connection
ANSWER = 0.3  # leases that the server may take to answer; more than ENTRY_WAIT of the reader

# Difference from which the server's clock counts as set anew: ages are off by less until then.
CLOCK_STEP_S = 0.5

# Both write the name of a change, and rows by pairs of a field and its value. The second script
# expects a value before each of them, "" for none, and leaves out a row with another one.
WRITE_ROWS = """
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('SET', KEYS[2], ARGV[1])
"""
WRITE_ROWS_AGAIN = """
for i = 2, #ARGV, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[i]) or '') == ARGV[i + 1] then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
  end
end
redis.call('SET', KEYS[2], ARGV[1])
"""


@asynccontextmanager
async def connected(server: StateServer) -> AsyncIterator[Client]:
    """Yields a client of the server.

    Faults of the connection raise a ServerError, perhaps in an exception group.
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


class WrongKey(RedisError):
    """A key of the shared state is of another type: somebody else has written it."""


async def check_types(client: Client, keys: Keys) -> None:
    """Raises WrongKey if a key that all processes share is of another type.

    It stays as it is, since it may be needed by whoever has written it.
    """
    for name, expected in keys.types.items():
        answer: Any = await client.type(name)
        found = answer.decode() if isinstance(answer, bytes) else answer
        if found not in (expected, "none"):
            raise WrongKey(
                f"the key {name} is a {found} instead of a {expected}: another program has"
                " written it; delete the key, or set another state_prefix"
            )


async def time_of(client: Client, keys: Keys) -> float:
    """Returns the server's clock in seconds; raises what the client raises.

    It runs a script, because the client of a cluster sends each command to the node of its keys,
    and TIME has no key.
    """
    answer: Any = await client.eval("return redis.call('TIME')", [keys.ops], [])
    seconds, micros = answer
    return int(seconds) + int(micros) / 1e6


class ServerClock:
    """The server's clock, as far as it is known here."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.ahead_s = 0.0  # the server's clock minus ours
        self._client = client
        self._keys = keys

    async def note(self) -> bool:
        """Compares the server's clock with ours; returns whether it had been set.

        Between two readings the server's clock may be set, or this machine may be suspended. Ages
        by the old difference would let other processes expire live requests. An answer that takes
        long shows a step only if it is larger than that time. Raises what the client raises.
        """
        before = trio.current_time()
        server = await time_of(self._client, self._keys)
        after = trio.current_time()
        if server - after - CLOCK_STEP_S <= self.ahead_s <= server - before + CLOCK_STEP_S:
            return False
        self.ahead_s = server - (before + after) / 2
        return True

    def ours(self, moment: float) -> float:
        """Returns a moment of the server's clock by ours; it is not in the future."""
        return min(trio.current_time(), moment - self.ahead_s)


class ServerLink:
    """A connection to the server, with what its commands need."""

    def __init__(self, client: Client, keys: Keys, lease_s: float) -> None:
        """A process counts as gone when it has not announced itself for `lease_s`."""
        self.client = client
        self.keys = keys
        self.lease_s = lease_s
        self.clock = ServerClock(client, keys)


async def write_rows(client: Client, keys: Keys, rows: Mapping[str, bytes]) -> None:
    """Writes rows of the catalog and notes its change, or does neither.

    It runs a script, so that no other process changes rows that it has seen before their writer
    knows that they are written. Raises what the client raises.
    """
    members = [part for row in rows.items() for part in row]
    names = [keys.catalog, keys.catalog_changes]
    await client.eval(WRITE_ROWS, names, [token_hex(8), *members])


async def write_rows_again(
    client: Client, keys: Keys, rows: Mapping[str, bytes], instead: Mapping[str, bytes]
) -> None:
    """Does what `write_rows` does, but for rows that another process has written meanwhile.

    `instead` has what is there instead of a row; nothing if the row is missing.
    """
    members = [part for name, row in rows.items() for part in (name, instead.get(name, b""), row)]
    names = [keys.catalog, keys.catalog_changes]
    await client.eval(WRITE_ROWS_AGAIN, names, [token_hex(8), *members])
