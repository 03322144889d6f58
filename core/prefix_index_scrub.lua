-- Clears the bits of retired slots in one part of all blocks; the last part frees the slots.
-- KEYS  blocks, slot table
-- ARGV  cursor ("0" to begin), then slot and stamp of each retired slot
-- Returns the cursor of the next part, "0" after the last.
--
-- A slot that somebody else has scrubbed and given away meanwhile has another stamp.
local blocks, slots = KEYS[1], KEYS[2]
local retired = {}
for at = 2, #ARGV, 2 do
  if redis.call('HGET', slots, 'dead ' .. ARGV[at]) == ARGV[at + 1] then
    retired[#retired + 1] = ARGV[at]
  end
end
if #retired == 0 then return '0' end

local function change(bitmap)
  for _, slot in ipairs(retired) do bitmap = clear_bit(bitmap, slot) end
  return bitmap
end
local cursor, entries = unpack(redis.call('HSCAN', blocks, ARGV[1], 'COUNT', 500))
local known, keys = {}, {}
for at = 1, #entries, 2 do
  if #entries[at] == 8 then keys[#keys + 1] = entries[at] end
  if #keys == 1000 or (at + 1 == #entries and #keys > 0) then
    rewrite(blocks, keys, change, known)
    keys = {}
  end
end
if cursor == '0' then
  for _, slot in ipairs(retired) do redis.call('HDEL', slots, 'dead ' .. slot) end
end
return cursor
