-- Returns the records of all live entries with their node ids, then the tombstones.
local after = '(' .. whole(now())
local live = {}
for _, node in ipairs(call('ZRANGEBYSCORE', ROSTER, after, '+inf')) do
  live[#live + 1] = node
  live[#live + 1] = call('HGET', ENTRIES, node)
end
return {live, call('ZRANGEBYSCORE', GONE, after, '+inf')}
