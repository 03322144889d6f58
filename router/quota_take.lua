-- Charges one request of a tenant, once however often it is asked to, or tells what it would
-- exceed.
-- KEYS     the tenant's buckets (hash), its requests in flight (sorted set by end of lease)
-- ARGV     request, lease in seconds, tokens,
--          requests: rate per second and burst; tokens: the same; most requests in flight
--          (a rate or a number of 0 is no limit)
-- Returns 0 and 0, or the number of the quota (1 requests, 2 tokens, 3 in flight) and after
-- how many milliseconds it may have room.
local buckets, leases = KEYS[1], KEYS[2]
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6

if redis.call('ZSCORE', leases, ARGV[1]) then return { 0, 0 } end

local function level(name, per_s, burst)
  local saved = redis.call('HMGET', buckets, name, name .. '_at')
  if not saved[1] then return burst end
  return math.min(burst, saved[1] + math.max(0, now - saved[2]) * per_s)
end

local function save(name, value)
  redis.call('HSET', buckets, name, string.format('%.6f', value),
             name .. '_at', string.format('%.6f', now))
end

local quotas = {
  { name = 'requests', amount = 1, per_s = tonumber(ARGV[4]), burst = tonumber(ARGV[5]) },
  { name = 'tokens', amount = tonumber(ARGV[3]), per_s = tonumber(ARGV[6]),
    burst = tonumber(ARGV[7]) },
}
for number, quota in ipairs(quotas) do
  if quota.per_s > 0 then
    quota.level = level(quota.name, quota.per_s, quota.burst)
    -- What is larger than the whole bucket goes when it is full, and leaves a debt.
    local missing = math.min(quota.amount, quota.burst) - quota.level
    if missing > 1e-6 then
      return { number, math.ceil(1000 * missing / quota.per_s) }
    end
  end
end

local limit = tonumber(ARGV[8])
redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
if limit > 0 and redis.call('ZCARD', leases) >= limit then return { 3, 1000 } end
redis.call('ZADD', leases, now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', leases, 2000 * ARGV[2])
for _, quota in ipairs(quotas) do
  if quota.level then save(quota.name, quota.level - quota.amount) end
end
-- By then every bucket without a debt is full again.
redis.call('EXPIRE', buckets, 3600)
return { 0, 0 }
