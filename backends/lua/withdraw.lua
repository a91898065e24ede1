-- ARGV: node id, milliseconds for the tombstone to live, a new revision, milliseconds for the run.
forget(ARGV[1])
call('ZADD', GONE, whole(now() + ARGV[2]), ARGV[1])
changed(ARGV[3])
keep(ARGV[4], GONE, MARKS, CHANGES)
