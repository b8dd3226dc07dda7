"""Which servers a URL means: one, the primary that sentinels name, or the nodes of a cluster. Used by calls.py, and by
whoever listens.

    redis://[:password@]host:6379/0                      one (rediss: with TLS; unix: a socket)
    redis+sentinel://[:password@]h1:26379,h2:26379/name  the primary that the sentinels call `name`
    redis+cluster://[:password@]h1:6379,h2:6379          a cluster; the nodes named are where it is looked for

The keys of one call have one hash tag, so that they lie on one node.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisError

TROUBLE: Final = (RedisError, OSError, TimeoutError)
_LISTEN_AGAIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class FunctionCall:
    function: str
    keys: list[str]
    arguments: list[str | int]


class Servers(Protocol):
    """timeout_s of those who make one: of a round trip, and of connecting."""

    async def send(self, calls: Sequence[FunctionCall]) -> list[Any]:
        """The replies in order, with an exception in place of one that failed. Raises one of TROUBLE if all failed."""

    async def load(self, library: str) -> None:
        """Load a library of functions everywhere. Raises one of TROUBLE."""

    async def close(self) -> None:
        """Give up the connections."""


@dataclass(frozen=True, slots=True)
class _Address:
    nodes: tuple[tuple[str, int], ...]
    password: str | None
    username: str | None
    tls: bool
    name: str


def open_servers(url: str, *, timeout_s: float) -> Servers:
    """Connects when it is first used."""
    if "+cluster://" in url:
        return _Cluster(_address(url, 6379), timeout_s)
    return _one(url, timeout_s)


@asynccontextmanager
async def open_listener(url: str) -> "AsyncIterator[redis.asyncio.Redis]":
    """A client that may subscribe. In a cluster every node hears what is published at any."""
    if "+cluster://" in url:
        address = _address(url, 6379)
        one = _One(_node(address, *address.nodes[0], timeout_s=None))
    else:
        one = _one(url, None)
    try:
        yield one.client
    finally:
        await one.close()


async def listen(url: str, channels: Callable[[], Iterable[str]], heard: Callable[[], None]) -> None:
    """For ever: call `heard` at every message. Without the server nothing is heard: whoever listens has a timer too.

    channels: those wanted now; one that is new is listened to within a second, one that is gone until the next trouble.
    """
    while True:
        try:
            async with open_listener(url) as client, client.pubsub(ignore_subscribe_messages=True) as pubsub:
                known: frozenset[str] = frozenset()
                while True:
                    if new := frozenset(channels()) - known:
                        await pubsub.subscribe(*new)
                        known |= new
                    if not known:
                        await asyncio.sleep(_LISTEN_AGAIN_S)
                    elif await pubsub.get_message(timeout=_LISTEN_AGAIN_S) is not None:
                        heard()
        except TROUBLE:
            await asyncio.sleep(_LISTEN_AGAIN_S)


def _one(url: str, timeout_s: float | None) -> "_One":
    if "+sentinel://" in url:
        address = _address(url, 26379)
        options: dict[str, Any] = _options(address, timeout_s)
        sentinels = Sentinel(list(address.nodes), sentinel_kwargs=_waits(timeout_s))  # type: ignore[no-untyped-call]  # as it is
        return _One(sentinels.master_for(address.name, **options), beside=sentinels.sentinels)
    return _One(redis.asyncio.Redis.from_url(url, decode_responses=True, **_waits(timeout_s)))


def _waits(timeout_s: float | None) -> dict[str, Any]:
    """None: as long as it takes, for those who listen."""
    if timeout_s is None:
        return {}
    bounds = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return {**bounds, "max_connections": 1, "retry": Retry(NoBackoff(), 0)}


def _options(address: _Address, timeout_s: float | None) -> dict[str, Any]:
    named = {"username": address.username, "password": address.password, "ssl": address.tls}
    return {**_waits(timeout_s), **{key: value for key, value in named.items() if value}, "decode_responses": True}


def _address(url: str, port: int) -> _Address:
    """Raises ValueError for a URL that names no node or, for sentinels, no primary."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    nodes = []
    for host in hosts.split(","):
        name, colon, number = host.rpartition(":")
        nodes.append((name, int(number)) if colon else (host, port))
    if not all(name for name, _ in nodes):
        raise ValueError("names no host")
    name = parts.path.strip("/")
    if "+sentinel" in parts.scheme and not name:
        raise ValueError("says no name of a primary: redis+sentinel://host:26379/name")
    return _Address(
        tuple(nodes), unquote(password) or None, unquote(username) or None, parts.scheme.startswith("rediss"), name
    )


class _One:
    """Implements Servers. Behind sentinels (beside) a connection that is made anew asks them who is primary now."""

    def __init__(self, client: "redis.asyncio.Redis", *, beside: "Iterable[redis.asyncio.Redis]" = ()) -> None:
        self.client = client
        self._beside = tuple(beside)

    async def send(self, calls: Sequence[FunctionCall]) -> list[Any]:
        async with self.client.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.fcall(call.function, len(call.keys), *call.keys, *map(str, call.arguments))
            return list(await pipeline.execute(raise_on_error=False))

    async def load(self, library: str) -> None:
        await self.client.function_load(library, replace=True)

    async def close(self) -> None:
        for client in (self.client, *self._beside):
            await client.aclose()


class _Cluster:
    """Implements Servers. Each node has a client of its own; where slots lie is asked again after any trouble."""

    def __init__(self, address: _Address, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._nodes: dict[tuple[str, int], _One] = {}
        self._ranges: list[tuple[int, int, tuple[str, int]]] = []
        self._library = ""

    async def send(self, calls: Sequence[FunctionCall]) -> list[Any]:
        if not self._ranges:
            await self._look()
        replies = await self._sent(calls)
        moved = [index for index, reply in enumerate(replies) if isinstance(reply, MovedError | AskError)]
        if moved:
            await self._look()
            for index, reply in zip(moved, await self._sent([calls[index] for index in moved]), strict=True):
                replies[index] = reply
        if any(isinstance(reply, OSError | TimeoutError | redis.ConnectionError) for reply in replies):
            self._ranges = []
        return replies

    async def load(self, library: str) -> None:
        self._library = library
        await self._look()

    async def close(self) -> None:
        nodes, self._nodes, self._ranges = self._nodes, {}, []
        await asyncio.gather(*(node.close() for node in nodes.values()))

    async def _sent(self, calls: Sequence[FunctionCall]) -> list[Any]:
        """By node; in one node in order."""
        by_node: dict[tuple[str, int], list[int]] = defaultdict(list)
        for index, call in enumerate(calls):
            by_node[self._node_of(key_slot(call.keys[0].encode()))].append(index)
        replies: list[Any] = [None] * len(calls)
        results = await asyncio.gather(
            *(self._nodes[node].send([calls[index] for index in indices]) for node, indices in by_node.items()),
            return_exceptions=True,
        )
        for indices, result in zip(by_node.values(), results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, TROUBLE):
                raise result
            found = [result] * len(indices) if isinstance(result, BaseException) else result
            for index, reply in zip(indices, found, strict=True):
                replies[index] = reply
        return replies

    def _node_of(self, slot: int) -> tuple[str, int]:
        for first, last, node in self._ranges:
            if first <= slot <= last:
                return node
        raise redis.ConnectionError("no node of the cluster has this slot now")

    async def _look(self) -> None:
        """Ask the nodes, known ones and those of the URL, where slots lie; new primaries get our functions."""
        trouble: BaseException = redis.ConnectionError("no node of the cluster answers")
        for node in dict.fromkeys([*self._nodes, *self._address.nodes]):
            client = _node(self._address, *node, timeout_s=self._timeout_s)
            try:
                # By words, so that every version of the library gives it as the server does.
                found: list[list[Any]] = await client.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]  # as it is
            except TROUBLE as error:
                trouble = error
                continue
            finally:
                await client.aclose()
            ranges = [(first, last, _where(primary, node)) for first, last, primary, *_ in found]
            await self._connect({where for _, _, where in ranges})
            self._ranges = ranges
            return
        raise trouble

    async def _connect(self, wanted: set[tuple[str, int]]) -> None:
        for node in self._nodes.keys() - wanted:
            await self._nodes.pop(node).close()
        for node in wanted - self._nodes.keys():
            self._nodes[node] = _One(_node(self._address, *node, timeout_s=self._timeout_s))
        if self._library:
            await asyncio.gather(*(self._nodes[node].load(self._library) for node in wanted))


def _where(primary: Sequence[Any], asked: tuple[str, int]) -> tuple[str, int]:
    """A node that does not know its own address says none: it is the one that was asked."""
    return (str(primary[0] or asked[0]), int(primary[1]))


def _node(address: _Address, host: str, port: int, *, timeout_s: float | None) -> "redis.asyncio.Redis":
    options: dict[str, Any] = _options(address, timeout_s)
    return redis.asyncio.Redis(host=host, port=port, **options)
