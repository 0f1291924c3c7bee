"""What keys have used, counted in Redis: exact however many routers count there, since a decision is one script.

Keys: ``{namespace}:quota:{hash of the key's id}`` has the buckets and sums, and with ``:holds`` the sequences that run,
by the time at which they end at the latest: those of a router that died are given back then. A Redis whose memory is
full may evict either; what ran then counts no more. Time is that of Redis; what was noted at a time to come counts as
noted now.
"""

from __future__ import annotations

import hashlib
from typing import Any

from cluster.access.counters import BUDGET_RETRY_S, Ask, Refusal
from cluster.access.keys import Limits
from cluster.state.connection import answer_within, connect_async

TIMEOUT_S = 0.25  # of one decision: the request waits for it
FIELDS = ("requests_per_minute", "tokens_per_minute", "concurrency", "tokens_in_flight", "budget_tokens")

_REFILL = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function level(name, cap)
  local kept = redis.call('HMGET', KEYS[1], name, name .. '_at')
  if not kept[1] then return cap end
  if tonumber(kept[2]) > now then redis.call('HSET', KEYS[1], name .. '_at', string.format('%.0f', now)) end
  return math.min(cap, kept[1] + math.max(0, now - kept[2]) * cap / 60000)
end
local function put(name, value)
  redis.call('HSET', KEYS[1], name, string.format('%.6f', value), name .. '_at', string.format('%.0f', now))
end
local function let_go(member)
  if redis.call('ZREM', KEYS[2], member) == 0 then return false end
  local sequences, tokens = string.match(member, ':(%d+):(%d+)$')
  redis.call('HINCRBY', KEYS[1], 'sequences', -sequences)
  redis.call('HINCRBY', KEYS[1], 'in_flight', -tokens)
  return true
end
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[2])
elseif redis.call('EXISTS', KEYS[2]) == 0 then redis.call('HDEL', KEYS[1], 'sequences', 'in_flight') end
"""

TAKE = (
    _REFILL
    + """
local rpm, tpm, most, flight, budget = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]),
  tonumber(ARGV[5])
local requests, sequences, tokens, ttl = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[10])
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 100)) do let_go(member) end
local sums = redis.call('HMGET', KEYS[1], 'sequences', 'in_flight', 'total')
local left, room = level('requests', rpm), level('tokens', tpm)
if requests > 0 and rpm > 0 and left < requests then return {1, math.ceil((requests - left) * 60000 / rpm)} end
if sequences > 0 and most > 0 and (sums[1] or 0) + sequences > most then return {3, 1000} end
if tokens > 0 and flight > 0 and (sums[2] or 0) + tokens > flight then return {4, 1000} end
if tokens > 0 and budget > 0 and (sums[3] or 0) + tokens > budget then return {5, 0} end
if tokens > 0 and tpm > 0 and room < tokens then return {2, math.ceil((tokens - room) * 60000 / tpm)} end
if requests > 0 and rpm > 0 then put('requests', left - requests) end
if tokens > 0 then
  if tpm > 0 then put('tokens', room - tokens) end
  redis.call('HINCRBY', KEYS[1], 'total', tokens)
end
if ARGV[9] ~= '' then
  redis.call('HINCRBY', KEYS[1], 'sequences', sequences)
  redis.call('HINCRBY', KEYS[1], 'in_flight', tokens)
  redis.call('ZADD', KEYS[2], now + ttl, ARGV[9] .. ':' .. sequences .. ':' .. tokens)
  redis.call('PEXPIRE', KEYS[2], 2 * ttl)
end
if budget > 0 then redis.call('PERSIST', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], 2 * ttl) end
return {0, 0}
"""
)

GIVE = (
    _REFILL
    + """
local tpm, unused = tonumber(ARGV[1]), tonumber(ARGV[3])
if not let_go(ARGV[2]) then return 0 end
if unused > 0 then
  if tpm > 0 then put('tokens', math.min(tpm, level('tokens', tpm) + unused)) end
  redis.call('HINCRBY', KEYS[1], 'total', -unused)
end
return 1
"""
)


class RedisCounters:
    """Counts of all routers at one Redis. ``close`` it."""

    def __init__(self, url: str, hold_ttl_s: float, namespace: str) -> None:
        """hold_ttl_s: longer than a sequence can run or wait, and than a minute."""
        self._client = connect_async(url, TIMEOUT_S, retries=0)
        self._ttl_ms = int(max(hold_ttl_s, 60.0) * 1000)
        self._prefix = f"{namespace}:quota:"
        self._take = self._client.register_script(TAKE)
        self._give = self._client.register_script(GIVE)

    async def take(self, key_id: str, limits: Limits, ask: Ask) -> Refusal | None:
        """See Counters. Raises OSError and redis.RedisError when Redis does not say within TIMEOUT_S."""
        caps = [getattr(limits, name) or 0 for name in FIELDS]
        arguments = [*caps, ask.requests, ask.sequences, ask.tokens, ask.hold, self._ttl_ms]
        which, wait_ms = await self._run(self._take, self._keys(key_id), arguments)
        if not which:
            return None
        return Refusal(FIELDS[which - 1], wait_ms / 1000 or BUDGET_RETRY_S)

    async def give(self, key_id: str, limits: Limits, ask: Ask, unused: int) -> None:
        """See Counters. Raises as ``take``."""
        member = f"{ask.hold}:{ask.sequences}:{ask.tokens}"
        await self._run(self._give, self._keys(key_id), [limits.tokens_per_minute or 0, member, unused])

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._client.aclose()

    def _keys(self, key_id: str) -> list[str]:
        root = self._prefix + hashlib.sha256(key_id.encode()).hexdigest()[:32]
        return [root, f"{root}:holds"]

    async def _run(self, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        return await answer_within(TIMEOUT_S, script(keys=keys, args=arguments))
