-- ARGV from 5 on: key, amount. Returns 1 and the sum, or 0 where there can be none. The sum is
-- read back as text, since Lua's numbers hold 53 bits only.
local key, before = ARGV[5], done()
if before then
  return {1, before}
end
local value = call('HGET', VALUES, key)
if value then
  -- Redis takes no leading zeros.
  local sign, digits = string.match(value, '^(%-?)0*(%d+)$')
  if not digits or #value > 20 then
    return {0}
  end
  local plain = digits == '0' and digits or sign .. digits
  begin()
  if plain ~= value then
    call('HSET', VALUES, key, plain)
  end
else
  begin()
end
local summed = redis.pcall('HINCRBY', VALUES, key, ARGV[6])
if type(summed) == 'table' then
  if value then
    call('HSET', VALUES, key, value)
  end
  if not string.find(summed.err, 'overflow') and not string.find(summed.err, 'not an integer') then
    return summed
  end
  return {0}
end
local sum = call('HGET', VALUES, key)
remember(sum, VALUES)
wake(key)
return {1, sum}
