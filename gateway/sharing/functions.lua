#!lua name=pagegate_pages_3

-- What gateway processes may take of each engine's pages: the arithmetic of sharing/board.py beside the claims, so that
-- one call judges and takes. Loaded and called by gateway/sharing/redis.py alone. All keys of a call carry the model as
-- their hash tag. Times are the server's own, in milliseconds.
--   claims:<replica>   hash: process -> tokens, and '@' -> the engine's epoch
--   hungry:<replica>   hash: process -> 'service had:until'
--   leases             sorted set: process -> end of its lease
--   polls              hash: engine -> 'process:until'
--   running:<engine>   hash: process -> its requests there
--   reports:<version>  hash: engine -> 'asked at:epoch:loads', the last as JSON
--   requests:<process> hash: engine id -> replica
--   served             hash: account -> seconds
--   freed              channel: replicas of which somebody has given something back
--   reported           channel: engines that were asked again

local HUNGER_MS = 1000
local FORGET_S = 86400

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- keys: claims, hungry, leases. args: process, epoch, total, least, wanted, hunger ('' for none), lease in ms, channel,
-- replica. Returns the board's epoch, tokens granted, tokens of others, and 1 if a hungrier process waits.
local function claim(keys, args)
  local process, epoch, total = args[1], args[2], tonumber(args[3])
  local least, wanted = tonumber(args[4]), tonumber(args[5])
  local now = now_ms()
  redis.call('ZADD', keys[3], now + tonumber(args[7]), process)
  local known, current, others = '', 0, 0
  local flat = redis.call('HGETALL', keys[1])
  for i = 1, #flat, 2 do
    if flat[i] == '@' then known = flat[i + 1]
    elseif flat[i] == process then current = tonumber(flat[i + 1])
    else others = others + tonumber(flat[i + 1]) end
  end
  if known == '' then
    known = epoch
    redis.call('HSET', keys[1], '@', epoch)
  end
  if known ~= epoch then return {known, 0, others, 0} end
  local mine, yields = math.huge, 0
  if args[6] ~= '' then
    mine = tonumber(args[6])
    redis.call('HSET', keys[2], process, args[6] .. ':' .. (now + HUNGER_MS))
    redis.call('EXPIRE', keys[2], FORGET_S)
  else
    redis.call('HDEL', keys[2], process)
  end
  local hungry = redis.call('HGETALL', keys[2])
  for i = 1, #hungry, 2 do
    local had, till = string.match(hungry[i + 1], '^(.*):(%d+)$')
    if tonumber(till) <= now then
      redis.call('HDEL', keys[2], hungry[i])
    elseif hungry[i] ~= process and tonumber(had) < mine then
      wanted = math.min(wanted, current)
      yields = 1
    end
  end
  local granted = math.max(least, math.min(wanted, total - others))
  if granted ~= current then redis.call('HSET', keys[1], process, granted) end
  redis.call('EXPIRE', keys[1], FORGET_S)
  if granted < current then redis.call('PUBLISH', args[8], args[9]) end
  return {known, granted, others, yields}
end

-- keys: claims. args: epoch before, epoch now.
local function restarted(keys, args)
  local known = redis.call('HGET', keys[1], '@')
  if known and known ~= args[1] then return 0 end
  redis.call('DEL', keys[1])
  redis.call('HSET', keys[1], '@', args[2])
  return 1
end

-- keys: leases, polls, then running and hungry of each engine. args: process, lease in ms, then each engine and its
-- requests there. Returns the engines it polls, the dead, the requests of others at each engine, and the engines where
-- others are hungry.
local function beat(keys, args)
  local process, lease, now = args[1], tonumber(args[2]), now_ms()
  redis.call('ZADD', keys[1], now + lease, process)
  local polls, others, hungry = {}, {}, {}
  for i = 3, #args, 2 do
    local engine, running = args[i], keys[i]
    local held = redis.call('HGET', keys[2], engine)
    local who, till = '', 0
    if held then who, till = string.match(held, '^(.*):(%d+)$') end
    if who == process or tonumber(till) <= now then
      redis.call('HSET', keys[2], engine, process .. ':' .. (now + lease))
      polls[#polls + 1] = engine
    end
    redis.call('HSET', running, process, args[i + 1])
    redis.call('EXPIRE', running, FORGET_S)
    local theirs = -tonumber(args[i + 1])
    for _, count in ipairs(redis.call('HVALS', running)) do theirs = theirs + tonumber(count) end
    others[#others + 1] = theirs
    local waits = false
    local flat = redis.call('HGETALL', keys[i + 1])
    for j = 1, #flat, 2 do
      local till = tonumber(string.match(flat[j + 1], '(%d+)$'))
      if flat[j] ~= process and till > now then waits = true end
    end
    if waits then hungry[#hungry + 1] = engine end
  end
  return {polls, redis.call('ZRANGEBYSCORE', keys[1], '-inf', now), others, hungry}
end

-- keys: reports. args: engine, its report's age in ms, epoch, loads, channel.
local function report(keys, args)
  local asked_at = now_ms() - tonumber(args[2])
  redis.call('HSET', keys[1], args[1], string.format('%.0f', asked_at) .. ':' .. args[3] .. ':' .. args[4])
  redis.call('EXPIRE', keys[1], FORGET_S)
  redis.call('PUBLISH', args[5], args[1])
  return 1
end

-- keys: reports. args: engines. Returns engine, age in ms, epoch, loads of each that is known.
local function reports(keys, args)
  local reply, now = {}, now_ms()
  for _, engine in ipairs(args) do
    local held = redis.call('HGET', keys[1], engine)
    if held then
      local asked_at, epoch, loads = string.match(held, '^(%d+):([^:]*):(.*)$')
      reply[#reply + 1] = engine
      reply[#reply + 1] = string.format('%.0f', now - tonumber(asked_at))
      reply[#reply + 1] = epoch
      reply[#reply + 1] = loads
    end
  end
  return reply
end

-- keys: requests. args: number that came, then id and replica of each, then ids that are gone.
local function note_requests(keys, args)
  local came = tonumber(args[1])
  for i = 1, came do redis.call('HSET', keys[1], args[2 * i], args[2 * i + 1]) end
  for i = 2 * came + 2, #args do redis.call('HDEL', keys[1], args[i]) end
  redis.call('EXPIRE', keys[1], FORGET_S)
  return 1
end

-- keys: requests.
local function estate(keys, args) return redis.call('HGETALL', keys[1]) end

-- keys: leases, requests, then claims and running. args: process, '1' if it must be dead, channel.
local function leave(keys, args)
  local process = args[1]
  if args[2] == '1' then
    local till = redis.call('ZSCORE', keys[1], process)
    if till and tonumber(till) > now_ms() then return 0 end
  end
  for i = 3, #keys do redis.call('HDEL', keys[i], process) end
  redis.call('ZREM', keys[1], process)
  redis.call('DEL', keys[2])
  redis.call('PUBLISH', args[3], '')
  return 1
end

-- keys: served. args: account and seconds in turn. Returns the totals in the same order.
local function served(keys, args)
  local totals = {}
  for i = 1, #args, 2 do totals[#totals + 1] = redis.call('HINCRBYFLOAT', keys[1], args[i], args[i + 1]) end
  redis.call('EXPIRE', keys[1], FORGET_S)
  return totals
end

redis.register_function('pagegate_claim_3', claim)
redis.register_function('pagegate_restarted_3', restarted)
redis.register_function('pagegate_beat_3', beat)
redis.register_function('pagegate_report_3', report)
redis.register_function('pagegate_reports_3', reports)
redis.register_function('pagegate_note_requests_3', note_requests)
redis.register_function('pagegate_estate_3', estate)
redis.register_function('pagegate_leave_3', leave)
redis.register_function('pagegate_served_3', served)
