-- ARGV from 5 on: key. Returns the value, or nothing.
local key, before = ARGV[5], done()
if before then
  return before
end
local queue = call('HGET', QUEUES, key)
if not queue then
  return false
end
begin()
local first, after = string.match(queue, '^(%d+):(%d+)$')
local value = call('HGET', QUEUED, first .. ':' .. key)
call('HDEL', QUEUED, first .. ':' .. key)
if first + 1 < tonumber(after) then
  call('HSET', QUEUES, key, whole(first + 1) .. ':' .. after)
else
  call('HDEL', QUEUES, key)
end
-- Without a value it was evicted: lost.
if value then
  remember(value)
end
return value
