-- ARGV: the beginning of keys, and whether to list them. Returns them, or how many there are.
local found, count = {}, 0
for _, key in ipairs(call('HKEYS', VALUES)) do
  if string.sub(key, 1, #ARGV[1]) == ARGV[1] then
    count = count + 1
    if ARGV[2] == '1' then
      found[count] = key
    end
  end
end
return ARGV[2] == '1' and found or count
