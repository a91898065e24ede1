-- ARGV from 5 on: key, value. A queue is a pair of numbers in QUEUES, of its first value and of the next
-- one to come; the values are in QUEUED. So all queues share two keys, which live as long as the run.
local key = ARGV[5]
if not done() then
  begin()
  local first, after = string.match(call('HGET', QUEUES, key) or '0:0', '^(%d+):(%d+)$')
  call('HSET', QUEUED, after .. ':' .. key, ARGV[6])
  call('HSET', QUEUES, key, first .. ':' .. whole(after + 1))
  remember('1', QUEUES, QUEUED)
  wake(key)
end
return 1
