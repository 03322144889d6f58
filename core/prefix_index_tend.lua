-- Retires the slots of workers that are silent, and says whether it is time to scrub.
-- KEYS  slot table
-- ARGV  lease of a slot in s, least time between two scrubs in s
-- Returns slot and stamp of each retired slot when the caller is to scrub them, else nothing.
local slots, now = KEYS[1], tonumber(redis.call('TIME')[1])
local entries = redis.call('HGETALL', slots)
for at = 1, #entries, 2 do
  local slot = string.match(entries[at], '^seen (%d+)$')
  if slot and now - tonumber(entries[at + 1]) > tonumber(ARGV[1]) then retire(slots, slot) end
end

local scrubbed_at = redis.call('HGET', slots, 'scrubbed')
if scrubbed_at and now - tonumber(scrubbed_at) < tonumber(ARGV[2]) then return {} end
local retired = {}
entries = redis.call('HGETALL', slots)
for at = 1, #entries, 2 do
  local slot = string.match(entries[at], '^dead (%d+)$')
  if slot then
    retired[#retired + 1] = slot
    retired[#retired + 1] = entries[at + 1]
  end
end
if #retired > 0 then redis.call('HSET', slots, 'scrubbed', now) end
return retired
