-- Renews members of a sorted set by end of lease, and forgets those whose lease is over.
-- KEYS     the set
-- ARGV     lease in seconds, then the members
-- Returns how many the set has.
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for at = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[at]) end
redis.call('PEXPIRE', KEYS[1], 2000 * ARGV[1])
return redis.call('ZCARD', KEYS[1])
