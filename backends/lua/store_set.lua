-- ARGV from 5 on: keys and values.
if not done() then
  begin()
  for index = 5, #ARGV, 2 do
    call('HSET', VALUES, ARGV[index], ARGV[index + 1])
  end
  remember('1', VALUES)
  for index = 5, #ARGV, 2 do
    wake(ARGV[index])
  end
end
return 1
