-- Put between common.lua and the scripts of the store. ARGV[1] is the operation's id, ARGV[2] the
-- milliseconds for the run to live. An operation that has had an effect is remembered, so that its
-- repeat, made since the answer was lost, has none and is answered as it was then.
local DONE, REMEMBERED = base .. 'operation:' .. ARGV[1], 600000

local function done()
  return call('GET', DONE)
end

local function remember(answer)
  call('SET', DONE, answer, 'PX', REMEMBERED)
  call('PEXPIRE', VALUES, ARGV[2])
end

local function queue_of(key)
  return base .. 'queue:' .. key
end

local function wake(key)
  call('PUBLISH', base .. 'wake:' .. key, '')
end
