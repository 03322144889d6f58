-- Applies one batch of a worker's cache events, unless Redis lost what went before.
-- KEYS  blocks, slot table
-- ARGV  slot, "<worker id> <epoch> <generation>" that it was given to, number of the last batch
--       known to have arrived, number of this batch, ttl in s,
--       stored blocks and removed blocks, each one blob of their 8-byte keys
-- Returns 1, or 0 when the slot is another's or a batch is missing: begin again.
local blocks, slots = KEYS[1], KEYS[2]
local slot, owner = ARGV[1], ARGV[2] .. ' '
local arrived, number = tonumber(ARGV[3]), tonumber(ARGV[4])
local stamp, name = unpack(redis.call('HMGET', slots, 'slot ' .. slot, 'index'))
if not stamp or string.sub(stamp, 1, #owner) ~= owner then return 0 end
local last = tonumber(string.sub(stamp, #owner + 1))
if last < arrived or last >= number then return 0 end
if redis.call('HGET', blocks, 'index') ~= name then return 0 end

local now = redis.call('TIME')[1]
redis.call('HSET', slots, 'slot ' .. slot, owner .. number, 'seen ' .. slot, now)
redis.call('EXPIRE', blocks, ARGV[5])
redis.call('EXPIRE', slots, ARGV[5])

local function apply(blob, change)
  local known = {}
  for first = 1, #blob, 8000 do
    local keys = {}
    for at = first, math.min(first + 7999, #blob), 8 do
      keys[#keys + 1] = string.sub(blob, at, at + 7)
    end
    rewrite(blocks, keys, function(bitmap) return change(bitmap, slot) end, known)
  end
end
apply(ARGV[6], set_bit)
apply(ARGV[7], clear_bit)
return 1
