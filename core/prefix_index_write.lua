-- Applies one batch of a worker's cache events, unless Redis lost what went before.
-- KEYS[1]  stamp of the worker: "<epoch>:<generation>"
-- ARGV     worker id, stamp, ttl in s, "1" to begin a generation, key prefix,
--          stored hashes and removed hashes, each one blob of 16-byte hashes
-- Returns 1, or 0 when the stamp is not there: everything must be published again.
local worker, stamp, ttl, begins, prefix = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local stored, removed = ARGV[6], ARGV[7]
if begins == '1' then
  redis.call('SET', KEYS[1], stamp)
elseif redis.call('GET', KEYS[1]) ~= stamp then
  return 0
end
redis.call('EXPIRE', KEYS[1], ttl)
for at = 1, #stored, 16 do
  local key = prefix .. string.sub(stored, at, at + 15)
  redis.call('HSET', key, worker, stamp)
  redis.call('EXPIRE', key, ttl)
end
for at = 1, #removed, 16 do
  local key = prefix .. string.sub(removed, at, at + 15)
  if redis.call('HGET', key, worker) == stamp then
    redis.call('HDEL', key, worker)
  end
end
return 1
