-- ARGV from 3 on: key, expected, desired. Returns 1 where it was written, else 0 and the value.
local key = ARGV[3]
if done() then
  return {1}
end
local value = call('HGET', VALUES, key)
if (value or '') == ARGV[4] then
  call('HSET', VALUES, key, ARGV[5])
  remember('1')
  wake(key)
  return {1}
end
return {0, value}
