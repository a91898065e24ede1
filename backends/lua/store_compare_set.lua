-- ARGV from 5 on: key, expected, desired. Returns 1 where it was written, else 0 and the value.
local key = ARGV[5]
if done() then
  return {1}
end
local value = call('HGET', VALUES, key)
if (value or '') == ARGV[6] then
  begin()
  call('HSET', VALUES, key, ARGV[7])
  remember('1', VALUES)
  wake(key)
  return {1}
end
return {0, value}
