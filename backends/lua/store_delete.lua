-- ARGV from 5 on: key. Returns whether there was a value.
if done() then
  return 1
end
if call('HEXISTS', VALUES, ARGV[5]) == 0 then
  return 0
end
begin()
call('HDEL', VALUES, ARGV[5])
remember('1', VALUES)
return 1
