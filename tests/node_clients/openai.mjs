// OpenAI's own package against both prefixes.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { ask, busy, checkCity, citySchema, given, refused } from "./given.mjs";

const tools = [{ type: "function", function: { name: "get_weather", parameters: citySchema } }];

for (const prefix of ["/v1", `/client/v4/accounts/${given.account_id}/ai/v1`]) {
  const client = new OpenAI({ baseURL: given.base_url + prefix, apiKey: given.api_key, maxRetries: 0 });
  // Greedy: a random draw of a random model may end at once.
  const base = { model: given.model, max_tokens: 24, temperature: 0 };

  const whole = await client.chat.completions.create({ ...base, messages: ask });
  assert.equal(typeof whole.choices[0].message.content, "string");
  assert.equal(whole.usage.completion_tokens, 24);

  const stream = await client.chat.completions.create({
    ...base, messages: ask, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usages = 0;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usages += chunk.usage ? 1 : 0;
  }
  assert.ok(text.length > 0);
  assert.equal(usages, 1);

  // A loop: the model must call, the result goes back, the model answers in text.
  const called = await client.chat.completions.create({
    ...base, messages: ask, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200,
  });
  assert.equal(called.choices[0].finish_reason, "tool_calls");
  const [call] = called.choices[0].message.tool_calls;
  checkCity(JSON.parse(call.function.arguments));
  const turns = [...ask, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "19 degrees" }];
  const after = await client.chat.completions.create({ ...base, messages: turns, tools, tool_choice: "none" });
  assert.equal(after.choices[0].message.tool_calls, undefined);

  const runner = client.chat.completions.stream({
    ...base, messages: ask, tools, tool_choice: { type: "function", function: { name: "get_weather" } }, max_tokens: 200,
  });
  const final = await runner.finalChatCompletion();
  checkCity(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments));
  assert.notEqual(final.choices[0].message.tool_calls[0].id, call.id);

  const structured = await client.chat.completions.create({
    ...base, messages: ask, max_tokens: 200,
    response_format: { type: "json_schema", json_schema: { name: "city", schema: citySchema, strict: true } },
  });
  checkCity(JSON.parse(structured.choices[0].message.content));

  const response = await client.responses.create({
    model: given.model, temperature: 0, input: "hi", tools: [{ type: "function", name: "get_weather", parameters: citySchema }],
    tool_choice: "required", max_output_tokens: 200, parallel_tool_calls: false,
  });
  checkCity(JSON.parse(response.output.find((item) => item.type === "function_call").arguments));

  const vectors = await client.embeddings.create({ model: given.embedding_model, input: ["a", "b"] });
  assert.equal(vectors.data.length, 2);
  assert.ok(Math.abs(Math.hypot(...vectors.data[0].embedding) - 1) < 1e-5);

  await refused(() => client.chat.completions.create({ model: "none", messages: ask }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
  });
  await refused(
    () => client.chat.completions.create({
      ...base, messages: ask,
      response_format: { type: "json_schema", json_schema: { name: "x", schema: { type: "objekt" } } },
    }),
    (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "response_format.json_schema.schema.type");
    },
  );

  // Tries again what may succeed, and not what the service says can't.
  const line = busy(1);
  const stubborn = new OpenAI({ baseURL: given.base_url + prefix, apiKey: given.api_key, maxRetries: 2, fetch: line.fetch });
  assert.equal((await stubborn.chat.completions.create({ ...base, messages: ask })).usage.completion_tokens, 24);
  assert.equal(line.used, 2);
  const bound = busy(0);
  const limited = new OpenAI({ baseURL: given.base_url + prefix, apiKey: given.limited_key, maxRetries: 2, fetch: bound.fetch });
  await refused(() => limited.chat.completions.create({ ...base, messages: ask }), (error) => {
    assert.ok(error instanceof OpenAI.RateLimitError);
    assert.equal(error.code, "request_exceeds_quota");
  });
  assert.equal(bound.used, 1, "x-should-retry: false was heeded");

  const leaving = new AbortController();
  setTimeout(() => leaving.abort(), 150);
  await refused(
    () => client.chat.completions.create({ ...base, messages: ask, max_tokens: 3000 }, { signal: leaving.signal }),
    (error) => assert.ok(error instanceof OpenAI.APIUserAbortError),
  );

  const left = await client.chat.completions.create({ model: given.model, temperature: 0, messages: ask, max_tokens: 1000, stream: true });
  for await (const _ of left) break; // leaving the loop closes the connection
}
