// Cloudflare's provider for the AI SDK, on the native route; its requests are led to the server under test.
import assert from "node:assert/strict";
import { embedMany, generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import { createWorkersAI } from "workers-ai-provider";
import { ask, busy, checkCity, citySchema, given, refused } from "./given.mjs";

const here = (url, options) => fetch(String(url).replace(/^https:\/\/[^/]+/, given.base_url), options);
const provider = createWorkersAI({ accountId: given.account_id, apiKey: given.api_key, fetch: here });
// Greedy: a random draw of a random model may end at once.
const base = { model: provider(given.model), maxRetries: 0, temperature: 0 };

const whole = await generateText({ ...base, messages: ask, maxOutputTokens: 12 });
assert.ok(whole.text.length > 0);
assert.equal(whole.usage.outputTokens, 12);

const streamed = streamText({ ...base, messages: ask, maxOutputTokens: 12 });
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.ok(text.length > 0);
assert.equal((await streamed.usage).outputTokens, 12);

const tools = { get_weather: tool({ description: "The weather.", inputSchema: jsonSchema(citySchema) }) };
const called = await generateText({ ...base, messages: ask, tools, toolChoice: "required", maxOutputTokens: 2000 });
assert.equal(called.finishReason, "tool-calls");
called.toolCalls.forEach((call) => checkCity(call.input));
const calling = streamText({ ...base, messages: ask, tools, toolChoice: "required", maxOutputTokens: 2000 });
const calls = await calling.toolCalls;
assert.ok(calls.length > 0);
calls.forEach((call) => checkCity(call.input));

const { object } = await generateObject({ ...base, schema: jsonSchema(citySchema), messages: ask, maxOutputTokens: 120 });
checkCity(object);

const { embeddings } = await embedMany({
  model: provider.textEmbedding(given.embedding_model), values: ["a", "b"], maxRetries: 0,
});
assert.equal(embeddings.length, 2);

await refused(() => generateText({ ...base, model: provider("@cf/no/such"), messages: ask }), (error) => {
  assert.equal(error.statusCode, 400);
  assert.match(error.responseBody, /5007/);
});

const line = busy(1, here);
const stubborn = createWorkersAI({ accountId: given.account_id, apiKey: given.api_key, fetch: line.fetch });
const again = await generateText({ ...base, model: stubborn(given.model), messages: ask, maxOutputTokens: 12, maxRetries: 2 });
assert.ok(again.text.length > 0);
assert.equal(line.used, 2);

const leaving = new AbortController();
const left = streamText({ ...base, messages: ask, maxOutputTokens: 1000, abortSignal: leaving.signal, onError: () => {} });
for await (const _ of left.textStream) {
  leaving.abort();
  break;
}
