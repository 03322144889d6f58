-- What the other scripts share; it stands before each of them.
--
-- A bitmap is a string: slot s is bit s % 8 of byte s / 8. It has no zero byte at its end, so
-- the bitmap of a block that nobody holds is empty and its field is deleted.

local function set_bit(bitmap, slot)
  local at = math.floor(slot / 8) + 1
  bitmap = bitmap .. string.rep('\0', at - #bitmap)
  local byte = bit.bor(string.byte(bitmap, at), bit.lshift(1, slot % 8))
  return string.sub(bitmap, 1, at - 1) .. string.char(byte) .. string.sub(bitmap, at + 1)
end

local function clear_bit(bitmap, slot)
  local at, mask = math.floor(slot / 8) + 1, bit.lshift(1, slot % 8)
  local byte = string.byte(bitmap, at) or 0
  if bit.band(byte, mask) == 0 then return bitmap end
  byte = string.char(bit.bxor(byte, mask))
  bitmap = string.sub(bitmap, 1, at - 1) .. byte .. string.sub(bitmap, at + 1)
  return (string.gsub(bitmap, '%z+$', ''))
end

-- Puts `change(bitmap)` in the place of the bitmap of each block in `keys`, at most 1,000.
-- There are few different bitmaps: `known` remembers what became of each.
local function rewrite(hash, keys, change, known)
  local bitmaps = redis.call('HMGET', hash, unpack(keys))
  local set, deleted = {}, {}
  for index, block in ipairs(keys) do
    local before = bitmaps[index] or ''
    local after = known[before]
    if not after then
      after = change(before)
      known[before] = after
    end
    if after ~= before then
      if after == '' then
        deleted[#deleted + 1] = block
      else
        set[#set + 1] = block
        set[#set + 1] = after
      end
    end
  end
  if #set > 0 then redis.call('HSET', hash, unpack(set)) end
  if #deleted > 0 then redis.call('HDEL', hash, unpack(deleted)) end
end

-- Takes a slot from its life. It may be given away again when its bits have been scrubbed.
local function retire(table_key, slot)
  local stamp = redis.call('HGET', table_key, 'slot ' .. slot)
  redis.call('HDEL', table_key, 'slot ' .. slot, 'seen ' .. slot)
  local now = redis.call('TIME')
  redis.call('HSET', table_key, 'dead ' .. slot, stamp, 'version', now[1] .. '.' .. now[2])
end
