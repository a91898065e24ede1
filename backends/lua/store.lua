-- Put between common.lua and the scripts of the store. ARGV[1] is the operation's id, ARGV[2] the
-- milliseconds for the run to live, ARGV[3] those in which the operation may be repeated, ARGV[4] the
-- ids of earlier ones whose answers have arrived, with blanks between. An operation that has had an
-- effect is remembered, so that its repeat, made since the answer was lost, has none and is answered
-- as it was then: until its answer has arrived, or its time is over.
local function done()
  return call('HGET', DONE, ARGV[1])
end

-- Before anything else is written, so that a command that the server refuses here has prevented the
-- effect. What is refused after it is refused after the answer was kept: a repeat finds it.
local function begin()
  local time = now()
  call('ZADD', DONE_UNTIL, whole(time + ARGV[3]), ARGV[1])
  keep(ARGV[2], DONE_UNTIL)
  -- Who takes one away for the one that he brings makes nothing grow.
  if ARGV[4] == '' then
    prune(time)
  end
end

local function remember(answer, ...)
  call('HSET', DONE, ARGV[1], answer)
  if ARGV[4] ~= '' then
    local answered = {}
    for id in string.gmatch(ARGV[4], '%S+') do
      answered[#answered + 1] = id
    end
    call('HDEL', DONE, unpack(answered))
    call('ZREM', DONE_UNTIL, unpack(answered))
  end
  keep(ARGV[2], DONE, ...)
end

local function wake(key)
  call('PUBLISH', base .. 'wake:' .. key, '')
end
