-- ARGV: the expected token or '', an id of this write, the document, milliseconds to live.
-- Returns 1 and the new token, or 0, the token that holds, and the document that holds.
local found = token()
if (found or '') ~= ARGV[1] then
  return {0, found or false, found and call('HGET', STATE, 'document') or false}
end
call('XADD', STATES, 'MAXLEN', 1, '*', 'write', ARGV[2])
local version = found and string.match(found, '^(%d+):') + 1 or 1
-- One command, and after what may fail: a script that fails half-way is not rolled back.
call('HSET', STATE, 'version', whole(version), 'write', ARGV[2], 'written', whole(now()), 'document', ARGV[3])
keep(ARGV[4], STATE, STATES)
return {1, whole(version) .. ':' .. ARGV[2]}
