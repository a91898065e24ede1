-- ARGV from 3 on: keys and values.
if not done() then
  for index = 3, #ARGV, 2 do
    call('HSET', VALUES, ARGV[index], ARGV[index + 1])
    wake(ARGV[index])
  end
  remember('1')
end
return 1
