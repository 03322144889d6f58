-- Gives one life of a worker a clean slot, in exchange for the one that it had.
-- KEYS  blocks, slot table
-- ARGV  worker id, epoch, generation, ttl in s
-- Returns the slot, or -1 when a later life or generation of this worker has one.
local blocks, slots = KEYS[1], KEYS[2]
local worker, epoch, generation = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = redis.call('TIME')

-- The two keys are one thing. When Redis lost or evicted one of them, the other goes, too.
local name = redis.call('HGET', slots, 'index')
if not name or redis.call('HGET', blocks, 'index') ~= name then
  redis.call('UNLINK', blocks, slots)
  name = now[1] .. '.' .. now[2]
  redis.call('HSET', blocks, 'index', name)
  redis.call('HSET', slots, 'index', name)
end

local is_taken, former = {}, nil
local entries = redis.call('HGETALL', slots)
for at = 1, #entries, 2 do
  local kind, slot = string.match(entries[at], '^(%l+) (%d+)$')
  if kind == 'dead' then
    is_taken[tonumber(slot)] = true
  elseif kind == 'slot' then
    is_taken[tonumber(slot)] = true
    local owner, its_epoch, its_generation = string.match(entries[at + 1], '^(%S+) (%S+) (%d+)')
    if owner == worker then
      its_epoch, its_generation = tonumber(its_epoch), tonumber(its_generation)
      if its_epoch > epoch or (its_epoch == epoch and its_generation >= generation) then
        return -1
      end
      former = slot
    end
  end
end
if former then retire(slots, former) end

local slot = 0
while is_taken[slot] do slot = slot + 1 end
redis.call(
  'HSET', slots, 'slot ' .. slot, worker .. ' ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' 0',
  'seen ' .. slot, now[1], 'version', now[1] .. '.' .. now[2]
)
redis.call('EXPIRE', blocks, ARGV[4])
redis.call('EXPIRE', slots, ARGV[4])
return slot
