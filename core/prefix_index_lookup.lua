-- How many leading blocks of a prompt each candidate holds.
-- KEYS  blocks, slot table
-- ARGV  blob of 16-byte hashes, then "life <worker id> <epoch>" of each candidate
-- Returns one count for each candidate.
--
-- What a worker holds is prefix-closed, so the end of its prefix is found by bisection. Workers
-- that agree on a probe share it: a group, a bitmap in 32-bit words, is split only where
-- answers differ. All groups take a step together, in one HMGET.
local blob = ARGV[1]
local counts, candidate_of, everyone = {}, {}, {}
for index, slot in ipairs(redis.call('HMGET', KEYS[2], unpack(ARGV, 2))) do
  counts[index] = 0
  if slot then
    local word, mask = math.floor(slot / 32) + 1, bit.lshift(1, slot % 32)
    for new = #everyone + 1, word do everyone[new], candidate_of[new] = 0, {} end
    everyone[word] = bit.bor(everyone[word], mask)
    candidate_of[word][mask] = index
  end
end
local num_words = #everyone
if num_words == 0 then return counts end

local format, zeros = '<' .. string.rep('I4', num_words), string.rep('\0', 4 * num_words)
local words_of = {}
local function to_words(bitmap)
  local words = words_of[bitmap]
  if not words then
    words = { struct.unpack(format, bitmap .. zeros) }
    words_of[bitmap] = words
  end
  return words
end

local open = {}
-- Notes that `group` holds block `low` (0: none asked yet) and not block `high`.
local function narrow(low, high, group, probe)
  if high - low > 1 then
    open[#open + 1] = { low, high, group, probe }
    return
  end
  for word = 1, num_words do
    local rest = group[word]
    while rest ~= 0 do
      local lowest = bit.band(rest, -rest)
      counts[candidate_of[word][lowest]] = low
      rest = bit.bxor(rest, lowest)
    end
  end
end

narrow(0, #blob / 16 + 1, everyone, 1)
while #open > 0 do
  local groups, hashes = open, {}
  open = {}
  for index, group in ipairs(groups) do
    hashes[index] = string.sub(blob, group[4] * 16 - 15, group[4] * 16)
  end
  local bitmaps = redis.call('HMGET', KEYS[1], unpack(hashes))
  for index, entry in ipairs(groups) do
    local low, high, group, probe = entry[1], entry[2], entry[3], entry[4]
    local words = to_words(bitmaps[index] or '')
    local holding, lacking, any_holding, any_lacking = {}, {}, 0, 0
    for word = 1, num_words do
      local both = bit.band(group[word], words[word])
      local rest = bit.bxor(group[word], both)
      holding[word], lacking[word] = both, rest
      any_holding, any_lacking = bit.bor(any_holding, both), bit.bor(any_lacking, rest)
    end
    if any_holding ~= 0 then narrow(probe, high, holding, math.floor((probe + high) / 2)) end
    if any_lacking ~= 0 then narrow(low, probe, lacking, math.floor((low + probe) / 2)) end
  end
end
return counts
