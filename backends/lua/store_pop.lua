-- ARGV from 3 on: key. Returns the value, or nothing.
local key, before = ARGV[3], done()
if before then
  return before
end
local value = call('LPOP', queue_of(key))
if value then
  remember(value)
  if call('EXISTS', queue_of(key)) == 0 then
    call('SREM', QUEUES, key)
  end
end
return value
