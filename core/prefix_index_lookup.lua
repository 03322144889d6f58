-- Where along each of some prompts' blocks the set of their holders changes.
-- KEYS  blocks, slot table
-- ARGV  version of the slot table, bitmap of the slots that are asked about, its length a multiple
--       of 4, then for each prompt a blob of its blocks' keys
-- Returns for each prompt position, bitmap, position, bitmap, …: the slots that hold the block at
-- that position (0: all that are asked about) and not all of them the next one. In no order.
-- Returns nil when the version is another one.
--
-- What a worker holds is prefix-closed, so the holders of a later block are among those of an
-- earlier one; where both are the same, so are all between. Other stretches are halved until
-- the changes are found, all stretches together, in one HMGET for each step.
if (redis.call('HGET', KEYS[2], 'version') or '') ~= ARGV[1] then return false end
local asked = ARGV[2]
local call, sub, num_words = redis.call, string.sub, #asked / 4
local nobody = string.rep('\0', #asked)
local format = '<' .. string.rep('I4', num_words)
local signed_format = '<' .. string.rep('i4', num_words)
local asked_words = { struct.unpack(format, asked) }

-- A block's bitmap, cut to the slots that are asked about. There are few different ones.
local known = {}
local function cut(bitmap)
  local words = { struct.unpack(format, bitmap .. nobody) }
  for word = 1, num_words do words[word] = bit.band(words[word], asked_words[word]) end
  local holders = struct.pack(signed_format, unpack(words, 1, num_words))
  known[bitmap] = holders
  return holders
end

local keys, probes = {}, {}

local function changes_of(blob)
  -- Four values for each stretch: a position, its block's holders, and the same of a later one.
  local stretches, num_values, halves, changes = { 0, asked, #blob / 8 + 1, nobody }, 4, {}, {}
  while num_values > 0 do
    local num_probes = 0
    for at = 1, num_values, 4 do
      local low = stretches[at]
      local probe = 1
      -- Most workers hold nothing of a prompt: its first block tells.
      if low > 0 then
        probe = low + stretches[at + 2]
        probe = (probe - probe % 2) / 2
      end
      num_probes = num_probes + 1
      probes[num_probes], keys[num_probes] = probe, sub(blob, probe * 8 - 7, probe * 8)
    end
    local bitmaps = call('HMGET', KEYS[1], unpack(keys, 1, num_probes))
    local n = 0
    for index = 1, num_probes do
      local at, probe, bitmap = index * 4, probes[index], bitmaps[index]
      local holders = bitmap and (known[bitmap] or cut(bitmap)) or nobody
      local low, low_holders = stretches[at - 3], stretches[at - 2]
      local high, high_holders = stretches[at - 1], stretches[at]
      if holders ~= low_holders then
        if probe - low > 1 then
          halves[n + 1], halves[n + 2], halves[n + 3], halves[n + 4] = low, low_holders, probe, holders
          n = n + 4
        else
          changes[#changes + 1], changes[#changes + 2] = low, low_holders
        end
      end
      if holders ~= high_holders then
        if high - probe > 1 then
          halves[n + 1], halves[n + 2], halves[n + 3], halves[n + 4] = probe, holders, high, high_holders
          n = n + 4
        else
          changes[#changes + 1], changes[#changes + 2] = probe, holders
        end
      end
    end
    stretches, halves, num_values = halves, stretches, n
  end
  return changes
end

local found = {}
for prompt = 3, #ARGV do found[prompt - 2] = changes_of(ARGV[prompt]) end
return found
