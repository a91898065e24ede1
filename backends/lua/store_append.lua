-- ARGV from 5 on: key, bytes, the most that a value may have. Returns 1, or 0 where it would have more.
local key = ARGV[5]
if done() then
  return 1
end
local whole_value = (call('HGET', VALUES, key) or '') .. ARGV[6]
if #whole_value > tonumber(ARGV[7]) then
  return 0
end
begin()
call('HSET', VALUES, key, whole_value)
remember('1', VALUES)
wake(key)
return 1
