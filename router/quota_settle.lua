-- A request of a tenant is over.
-- KEYS     the tenant's buckets, its requests in flight
-- ARGV     request, tokens to give back (less than 0: to charge on top)
redis.call('ZREM', KEYS[2], ARGV[1])
if ARGV[2] ~= '0' and redis.call('HEXISTS', KEYS[1], 'tokens') == 1 then
  redis.call('HINCRBYFLOAT', KEYS[1], 'tokens', ARGV[2])
end
