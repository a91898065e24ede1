-- ARGV from 3 on: key. Returns whether there was a value.
if done() then
  return 1
end
local deleted = call('HDEL', VALUES, ARGV[3])
if deleted == 1 then
  remember('1')
end
return deleted
