// The AI SDK over its OpenAI-compatible provider: text, streams, tools in a loop, objects, embeddings, errors.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { ask, busy, checkCity, citySchema, given, refused } from "./given.mjs";

const provider = createOpenAICompatible({
  name: "pagegate", baseURL: `${given.base_url}/v1`, apiKey: given.api_key, supportsStructuredOutputs: true,
  includeUsage: true,
});
const model = provider(given.model);
// Greedy: a random draw of a random model may end at once.
const base = { model, maxRetries: 0, temperature: 0 };
// A model of random weights would call for ever.
const once = { ...base, providerOptions: { pagegate: { parallel_tool_calls: false } } };

const whole = await generateText({ ...base, messages: ask, maxOutputTokens: 12 });
assert.ok(whole.text.length > 0);
assert.equal(whole.usage.outputTokens, 12);

const streamed = streamText({ ...base, messages: ask, maxOutputTokens: 12 });
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.ok(text.length > 0);
assert.equal((await streamed.usage).outputTokens, 12);
assert.equal(await streamed.finishReason, "length");

const asked = [];
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: jsonSchema(citySchema),
    execute: async (input) => {
      asked.push(input);
      return { degrees: 19 };
    },
  }),
};
for (const run of [
  () => generateText({ ...once, messages: ask, tools, toolChoice: "required", stopWhen: stepCountIs(2), maxOutputTokens: 120 }),
  async () => {
    const result = streamText({ ...once, messages: ask, tools, toolChoice: "required", stopWhen: stepCountIs(2), maxOutputTokens: 120 });
    await result.consumeStream();
    return { steps: await result.steps };
  },
]) {
  const { steps } = await run();
  assert.equal(steps.length, 2, "the loop went on after the first call");
  const ids = steps.flatMap((step) => step.toolCalls.map((call) => call.toolCallId));
  assert.equal(new Set(ids).size, ids.length, "ids are unique over the conversation");
}
assert.ok(asked.length >= 2);
asked.forEach(checkCity);

const { object } = await generateObject({ ...base, schema: jsonSchema(citySchema), messages: ask, maxOutputTokens: 120 });
checkCity(object);

const { embeddings } = await embedMany({
  model: provider.textEmbeddingModel(given.embedding_model), values: ["a", "b", "c"], maxRetries: 0,
});
assert.equal(embeddings.length, 3);

await refused(() => generateText({ ...base, messages: ask, temperature: 9 }), (error) => {
  assert.ok(APICallError.isInstance(error));
  assert.equal(error.statusCode, 400);
  assert.match(error.message, /temperature/);
});

const line = busy(1);
const stubborn = createOpenAICompatible({ name: "pagegate", baseURL: `${given.base_url}/v1`, apiKey: given.api_key, fetch: line.fetch });
const again = await generateText({ model: stubborn(given.model), temperature: 0, messages: ask, maxOutputTokens: 12, maxRetries: 2 });
assert.ok(again.text.length > 0);
assert.equal(line.used, 2);

await refused(
  () => generateText({ ...base, messages: ask, maxOutputTokens: 3000, abortSignal: AbortSignal.timeout(150) }),
  (error) => assert.match(error.name, /AbortError|TimeoutError/),
);

const leaving = new AbortController();
const left = streamText({ ...base, messages: ask, maxOutputTokens: 1000, abortSignal: leaving.signal, onError: () => {} });
for await (const _ of left.textStream) {
  leaving.abort();
  break;
}
