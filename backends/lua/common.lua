-- Put before every script. KEYS[1] is the beginning of all keys of one run: it holds the hash tag
-- that keeps them on one node of a cluster. Times are the server's, in milliseconds.
local base = KEYS[1]
local STATE, ROSTER, ENTRIES = base .. 'state', base .. 'roster', base .. 'entries'
local GONE, MARKS = base .. 'gone', base .. 'marks'
local STATES, CHANGES = base .. 'states', base .. 'changes'
local VALUES, QUEUES, QUEUED = base .. 'values', base .. 'queues', base .. 'queued'
local DONE, DONE_UNTIL, LIFE = base .. 'done', base .. 'done-until', base .. 'life'
local call = redis.call

local function now()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number)
  return string.format('%.0f', number)
end

-- Two keys that one script gives the same time may still end a millisecond apart: with the second on
-- top, looks that come soon after find nothing to lengthen.
local function last_until(key, milliseconds)
  if call('PTTL', key) < milliseconds then
    call('PEXPIRE', key, whole(milliseconds + 1000))
  end
end

-- Let all keys of the run live for `lifetime` more milliseconds; those that the caller may have
-- created come after it. No life is ever made shorter: whoever wants least may come last. No key
-- ends before LIFE, so mostly a look at that is enough, and the cost does not grow with what is
-- stored. The keys of labels are not among them: who has a label keeps its key at each beat.
local function keep(lifetime, ...)
  local wanted, left = tonumber(lifetime), call('PTTL', LIFE)
  if left >= wanted then
    for _, key in ipairs({...}) do
      last_until(key, left)
    end
    return
  end
  left = wanted + math.ceil(wanted / 8)
  call('SET', LIFE, '', 'PX', whole(left))
  for _, key in ipairs({
    STATE, ROSTER, ENTRIES, GONE, MARKS, STATES, CHANGES, VALUES, QUEUES, QUEUED, DONE, DONE_UNTIL, ...
  }) do
    last_until(key, left)
  end
end

-- Forget the answers that nobody can ask for again, a few at a time.
local function prune(time)
  local over = call('ZRANGEBYSCORE', DONE_UNTIL, '-inf', whole(time), 'LIMIT', 0, 16)
  if over[1] then
    call('HDEL', DONE, unpack(over))
    call('ZREM', DONE_UNTIL, unpack(over))
  end
end

local function token()
  local found = call('HMGET', STATE, 'version', 'write')
  return found[1] and (found[1] .. ':' .. (found[2] or ''))
end

local function labelled(label)
  return base .. 'label:' .. label
end

-- An entry is stored as "arrival:length of label:label data".
local function unpacked(record)
  local arrival, size, rest = string.match(record, '^(%d+):(%d+):()')
  return arrival, string.sub(record, rest, rest + size - 1), string.sub(record, rest + size)
end

local function is_live(node, time)
  local expires = call('ZSCORE', ROSTER, node)
  return expires and tonumber(expires) > time
end

local function forget(node)
  local record = call('HGET', ENTRIES, node)
  if record then
    local _, label = unpacked(record)
    call('ZREM', labelled(label), node)
    call('HDEL', ENTRIES, node)
  end
  call('ZREM', ROSTER, node)
end

local function changed(revision)
  call('HSET', MARKS, 'revision', revision)
  call('XADD', CHANGES, 'MAXLEN', 1, '*', 'revision', revision)
end

local function pulse(time, present, peer, label)
  local after = '(' .. whole(time)
  local first = call('ZRANGEBYSCORE', ROSTER, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  local written = call('HGET', STATE, 'written')
  return {
    token() or false,
    call('ZCOUNT', ROSTER, after, '+inf'),
    call('HGET', MARKS, 'revision') or '',
    present and 1 or 0,
    is_live(peer, time) and 1 or 0,
    label ~= '' and call('ZCOUNT', labelled(label), after, '+inf') or 0,
    written and whole(time - written) or false,
    first[2] and whole(first[2] - time) or false,
  }
end
