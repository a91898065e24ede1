-- ARGV: node id, milliseconds to live, peer, label to count, milliseconds for the run to live.
-- Returns a pulse. An entry that has expired stays so.
local node = ARGV[1]
local time = now()
local record = is_live(node, time) and call('HGET', ENTRIES, node)
if record then
  local expires = whole(time + ARGV[2])
  -- First what takes away: a server that is full refuses nothing to a script that has begun so. A beat
  -- makes nothing grow, and running nodes are to stay alive.
  call('ZREMRANGEBYSCORE', GONE, '-inf', whole(time))
  call('ZADD', ROSTER, expires, node)
  local _, label = unpacked(record)
  if label ~= '' then
    call('ZADD', labelled(label), expires, node)
  end
  keep(ARGV[5], label ~= '' and labelled(label) or nil)
  prune(time)
end
return pulse(time, record, ARGV[3], ARGV[4])
