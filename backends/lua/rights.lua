-- Runs every command that the scripts run, on keys that are gone afterwards. Returns the names of those
-- that the user may not run. The names in the text of an error differ from server to server, and in
-- Redis 6.2 there are none.
local missing = {}
local function may(name, ...)
  local answer = redis.pcall(name, ...)
  local text = type(answer) == 'table' and answer.err or ''
  if string.find(text, 'permission') or string.find(text, "executing the script can't") then
    missing[#missing + 1] = string.lower(name)
    return false
  end
  return true
end
local probe = base .. 'rights:'
local hash, set, stream, text = probe .. 'hash', probe .. 'set', probe .. 'stream', probe .. 'text'
-- First the one that takes the traces away.
if not may('PEXPIRE', hash, 0) then
  return missing
end
may('TIME')
may('PTTL', text)
may('SET', text, '', 'PX', 1000)
may('HSET', hash, 'a', '1')
may('HGET', hash, 'a')
may('HMGET', hash, 'a')
may('HEXISTS', hash, 'a')
may('HINCRBY', hash, 'a', 1)
may('HKEYS', hash)
may('HDEL', hash, 'b')
may('ZADD', set, 1, 'a')
may('ZSCORE', set, 'a')
may('ZCOUNT', set, 1, 2)
may('ZRANGEBYSCORE', set, 1, 2)
may('ZREMRANGEBYSCORE', set, 3, 4)
may('ZREM', set, 'b')
may('XADD', stream, '*', 'a', '1')
may('XREAD', 'STREAMS', stream, '0')
may('XREVRANGE', stream, '+', '-')
may('PUBLISH', base .. 'wake:', '')
for _, key in ipairs({hash, set, stream, text}) do
  redis.pcall('PEXPIRE', key, 0)
end
return missing
