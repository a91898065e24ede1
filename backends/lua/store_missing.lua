-- ARGV: keys. Returns the positions of those that have neither a value nor a queue.
local missing = {}
for index, key in ipairs(ARGV) do
  if call('HEXISTS', VALUES, key) == 0 and call('HEXISTS', QUEUES, key) == 0 then
    missing[#missing + 1] = index
  end
end
return missing
