"""Targets on real servers, with all that may be done to these."""

from __future__ import annotations

from typing import Any

import redis

from rdzv.conformance.registered import RegisteredTarget

TIMES = {"read_timeout": "2"}
"""Clauses in which nothing answers wait for it."""


class RedisTarget(RegisteredTarget):
    """Redis or Valkey. A wipe loses what all runs have stored there."""

    short_ttl_seconds = 0.3
    call_seconds_max = 6.0

    def __init__(self, server: Any, name: str = "redis", **options: Any) -> None:
        super().__init__("redis", server.endpoint(), {**TIMES, **options}, server=server)
        self.name = name

    def corrupt(self, run_id: str = "job") -> None:
        host, port = self.server.address
        with redis.Redis(host, port, socket_timeout=5.0) as client:
            for key in client.scan_iter(match="*:state"):
                client.set(key, "a text")

    def wipe(self) -> None:
        host, port = self.server.address
        with redis.Redis(host, port, socket_timeout=5.0) as client:
            client.flushall()
