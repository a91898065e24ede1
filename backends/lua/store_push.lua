-- ARGV from 3 on: key, value.
local key = ARGV[3]
if not done() then
  call('RPUSH', queue_of(key), ARGV[4])
  call('PEXPIRE', queue_of(key), ARGV[2])
  call('SADD', QUEUES, key)
  call('PEXPIRE', QUEUES, ARGV[2])
  remember('1')
  wake(key)
end
return 1
