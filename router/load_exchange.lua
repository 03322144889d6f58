-- Publishes what one router has sent, and reads what the others have.
-- KEYS     a hash: router -> end of lease in Redis' time, a space, what it has sent
-- ARGV     router, lease in seconds, what it has sent
-- Returns what each of the others has sent whose lease runs.
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.3f %s', now + ARGV[2], ARGV[3]))
redis.call('PEXPIRE', KEYS[1], 2000 * ARGV[2])
local all, others = redis.call('HGETALL', KEYS[1]), {}
for at = 1, #all, 2 do
  if all[at] ~= ARGV[1] then
    local ends, sent = string.match(all[at + 1], '^(%S+) (.*)$')
    if tonumber(ends) > now then
      table.insert(others, sent)
    else
      redis.call('HDEL', KEYS[1], all[at])
    end
  end
end
return others
