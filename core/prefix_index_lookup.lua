-- How many leading blocks of a prompt each candidate holds.
-- ARGV     block key prefix, stamp key prefix, blob of 16-byte hashes,
--          then worker id and epoch of each candidate
-- Returns one count for each candidate.
--
-- What a worker holds is prefix-closed, so the end of its prefix is found by bisection.
-- Workers that agree on a probe share it: a group is split only where answers differ.
local block_prefix, stamp_prefix, blob = ARGV[1], ARGV[2], ARGV[3]
local counts, workers, stamps, first_group = {}, {}, {}, {}
for at = 4, #ARGV, 2 do
  local index = (at - 2) / 2
  local stamp = redis.call('GET', stamp_prefix .. ARGV[at])
  counts[index] = 0
  workers[index] = ARGV[at]
  local fence = ARGV[at + 1] .. ':'
  if stamp and string.sub(stamp, 1, #fence) == fence then
    stamps[index] = stamp
    first_group[#first_group + 1] = index
  end
end

-- Each entry: a group that holds block `low` (0: none asked yet) and not block `high`.
local open = { { 0, #blob / 16 + 1, first_group, 1 } }
while #open > 0 do
  local low, high, group, probe = unpack(table.remove(open))
  if #group > 0 then
    if high - low <= 1 then
      for _, index in ipairs(group) do counts[index] = low end
    else
      local names = {}
      for _, index in ipairs(group) do names[#names + 1] = workers[index] end
      local key = block_prefix .. string.sub(blob, probe * 16 - 15, probe * 16)
      local found = redis.call('HMGET', key, unpack(names))
      local holding, lacking = {}, {}
      for position, index in ipairs(group) do
        local side = found[position] == stamps[index] and holding or lacking
        side[#side + 1] = index
      end
      open[#open + 1] = { probe, high, holding, math.floor((probe + high) / 2) }
      open[#open + 1] = { low, probe, lacking, math.floor((low + probe) / 2) }
    end
  end
end
return counts
