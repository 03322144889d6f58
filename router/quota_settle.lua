-- A request of a tenant is over. Nothing happens when it is not in flight by these keys: it was
-- never charged, or is settled already.
-- KEYS     the tenant's buckets, its requests in flight
-- ARGV     request, tokens to give back (less than 0: to charge on top)
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then return end
if ARGV[2] ~= '0' and redis.call('HEXISTS', KEYS[1], 'tokens') == 1 then
  redis.call('HINCRBYFLOAT', KEYS[1], 'tokens', ARGV[2])
end
