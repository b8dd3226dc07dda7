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
