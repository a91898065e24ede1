-- ARGV from 3 on: key, bytes, the most that a value may have. Returns 1, or 0 where it would have more.
local key = ARGV[3]
if done() then
  return 1
end
local whole_value = (call('HGET', VALUES, key) or '') .. ARGV[4]
if #whole_value > tonumber(ARGV[5]) then
  return 0
end
call('HSET', VALUES, key, whole_value)
remember('1')
wake(key)
return 1
