-- ARGV: the token that the caller knows, or ''. Returns the token, the revision, the ids of the last
-- changes of document and roster, and the document if its token is another one.
local function last(stream)
  local entry = call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  return entry and entry[1] or '0-0'
end
local found = token()
local document = found and found ~= ARGV[1] and call('HGET', STATE, 'document')
return {
  found or false,
  call('HGET', MARKS, 'revision') or '',
  last(STATES),
  last(CHANGES),
  document or false,
}
