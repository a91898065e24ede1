-- ARGV: node id, label, data, milliseconds to live, a new revision, peer, label to count, milliseconds
-- for the run to live. Returns a pulse.
local node, label, data = ARGV[1], ARGV[2], ARGV[3]
local time = now()
local expires = whole(time + ARGV[4])
local record = is_live(node, time) and call('HGET', ENTRIES, node)
local arrival, old_label, old_data
if record then
  arrival, old_label, old_data = unpacked(record)
else
  for _, over in ipairs(call('ZRANGEBYSCORE', ROSTER, '-inf', whole(time), 'LIMIT', 0, 100)) do
    forget(over)
  end
  call('ZREMRANGEBYSCORE', GONE, '-inf', whole(time))
  call('ZREM', GONE, node)
  arrival = call('HINCRBY', MARKS, 'arrivals', 1)
end
if old_label ~= label or old_data ~= data then
  if old_label and old_label ~= label then
    call('ZREM', labelled(old_label), node)
  end
  call('HSET', ENTRIES, node, arrival .. ':' .. #label .. ':' .. label .. data)
  changed(ARGV[5])
end
call('ZADD', ROSTER, expires, node)
if label ~= '' then
  call('ZADD', labelled(label), expires, node)
end
keep(ARGV[8], ROSTER, ENTRIES, GONE, MARKS, CHANGES, label ~= '' and labelled(label) or nil)
return pulse(time, true, ARGV[6], ARGV[7])
