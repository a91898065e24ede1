-- Returns the records of all live entries with their node ids, then the tombstones.
local after = '(' .. whole(now())
local live = {}
for _, node in ipairs(call('ZRANGEBYSCORE', ROSTER, after, '+inf')) do
  local record = call('HGET', ENTRIES, node)
  -- Without one it was evicted: lost, and put back by its node.
  if record then
    live[#live + 1] = node
    live[#live + 1] = record
  end
end
return {live, call('ZRANGEBYSCORE', GONE, after, '+inf')}
