#!lua name=pagegate_meters_1

-- Meters shared by several processes: the arithmetic of tenancy/quotas.py beside the counts, so that one call judges
-- and takes all of an account's meters or none. Loaded and called by tenancy/meters/redis.py alone.
--
-- All keys of a call carry the account id as their hash tag. The first is the set of open requests, and a slot too.
--   counter   hash: bucket number -> count                 (bucket_ms > 0)
--   slots     sorted set: request id -> end of its lease    (bucket_ms = 0)
-- A settle applies only if the request is still among the open ones, which makes it idempotent, and makes one that
-- comes after the data was lost do nothing.
-- The first argument is the time in milliseconds, empty for the server's own.

local SLOT_RETRY_MS = 1000

local function now_from(text)
  if text ~= '' then return tonumber(text) end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- A claim beside what its counter holds: used, milliseconds until all is usable, milliseconds until the claim fits.
local function judge_counter(key, claim, now)
  local oldest = math.floor(now / claim.bucket_ms) - claim.buckets + 1
  local flat = redis.call('HGETALL', key)
  local live, used = {}, 0
  for i = 1, #flat, 2 do
    local bucket, count = tonumber(flat[i]), tonumber(flat[i + 1])
    if bucket < oldest then
      redis.call('HDEL', key, flat[i])
    elseif count > 0 then
      live[#live + 1] = {bucket, count}
      used = used + count
    end
  end
  table.sort(live, function(a, b) return a[1] < b[1] end)
  local function leaves(bucket) return (bucket + claim.buckets) * claim.bucket_ms - now end
  local reset = #live > 0 and leaves(live[#live][1]) or 0
  local wait = 0
  if claim.limit > 0 and used + claim.amount > claim.limit then
    wait = -1
    local left = used
    for _, entry in ipairs(live) do
      left = left - entry[2]
      if left + claim.amount <= claim.limit then
        wait = leaves(entry[1])
        break
      end
    end
  end
  return used, reset, wait
end

local function judge_slot(key, claim, now)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  local held = redis.call('ZCARD', key)
  local full = claim.limit > 0 and held + claim.amount > claim.limit
  return held, 0, full and SLOT_RETRY_MS or 0
end

-- now, request id, lease in ms, then for each key: amount, limit (0: none), bucket_ms, buckets.
-- An empty request id takes nothing. Returns granted, now, then for each key: used before, reset, wait.
local function reserve(keys, args)
  local now, request, lease = now_from(args[1]), args[2], tonumber(args[3])
  local claims, granted = {}, request ~= ''
  local reply = {0, now}
  for i, key in ipairs(keys) do
    local at = 4 + (i - 1) * 4
    local claim = {
      amount = tonumber(args[at]),
      limit = tonumber(args[at + 1]),
      bucket_ms = tonumber(args[at + 2]),
      buckets = tonumber(args[at + 3]),
    }
    claims[i] = claim
    local judge = claim.bucket_ms > 0 and judge_counter or judge_slot
    local used, reset, wait = judge(key, claim, now)
    if wait ~= 0 then granted = false end
    reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = used, reset, wait
  end
  if not granted then return reply end
  reply[1] = 1
  for i, key in ipairs(keys) do
    local claim = claims[i]
    if claim.bucket_ms > 0 then
      redis.call('HINCRBY', key, math.floor(now / claim.bucket_ms), claim.amount)
      redis.call('PEXPIRE', key, claim.bucket_ms * (claim.buckets + 1))
    else
      redis.call('ZADD', key, now + lease, request)
      redis.call('PEXPIRE', key, lease * 2)
    end
  end
  return reply
end

-- request id, then for each key: the bucket it was booked in ('' for slots), and the difference to what was reserved.
local function settle(keys, args)
  local request = args[1]
  if redis.call('ZREM', keys[1], request) == 0 then return 0 end
  for i = 2, #keys do
    local bucket, difference = args[i * 2], args[i * 2 + 1]
    if bucket == '' then
      redis.call('ZREM', keys[i], request)
    elseif redis.call('HEXISTS', keys[i], bucket) == 1 then
      redis.call('HINCRBY', keys[i], bucket, difference)
    end
  end
  return 1
end

-- now, request id, lease in ms: its slots live on, also where the data was lost.
local function renew(keys, args)
  local now, lease = now_from(args[1]), tonumber(args[3])
  for _, key in ipairs(keys) do
    redis.call('ZADD', key, now + lease, args[2])
    redis.call('PEXPIRE', key, lease * 2)
  end
  return 1
end

redis.register_function('pagegate_reserve_1', reserve)
redis.register_function('pagegate_settle_1', settle)
redis.register_function('pagegate_renew_1', renew)
