// What the test that starts these scripts hands in, and the few things that all of them ask.
import assert from "node:assert/strict";

export const given = JSON.parse(process.env.PAGEGATE_GIVEN);
export const ask = [{ role: "user", content: "What is the weather in Oslo?" }];
export const citySchema = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Bergen"] }, days: { enum: [1, 2] } },
  required: ["city", "days"],
  additionalProperties: false,
};

export function checkCity(value) {
  assert.ok(["Oslo", "Bergen"].includes(value.city), JSON.stringify(value));
  assert.ok([1, 2].includes(value.days), JSON.stringify(value));
}

// A way to the service that is refused for want of room `times` times first, and how often it was used.
export function busy(times, inner = fetch) {
  const message = "No room.";
  const body = {
    error: { message, type: "rate_limit_error", param: null, code: "capacity_exceeded" },
    result: null, success: false, errors: [{ code: 3040, message }], messages: [],
  };
  const line = { used: 0 };
  line.fetch = async (url, options) => {
    line.used += 1;
    if (line.used > times) return inner(url, options);
    return Response.json(body, { status: 429, headers: { "retry-after": "1" } });
  };
  return line;
}

export async function refused(deed, check) {
  let said;
  try {
    said = await deed();
  } catch (error) {
    check(error);
    return;
  }
  assert.fail(`should have been refused, said ${JSON.stringify(said)}`);
}
