// Streams a chat into the page, and says what it took. The server charges and counts; this only shows.
"use strict";

(() => {
  const form = document.getElementById("talk");
  const answer = document.getElementById("answer");
  const said = document.getElementById("said");
  const send = document.getElementById("send");
  const stop = document.getElementById("stop");
  const field = (name) => form.elements[name].value;
  let running = null;

  function body() {
    const messages = [];
    if (field("system").trim()) messages.push({ role: "system", content: field("system") });
    messages.push({ role: "user", content: field("prompt") });
    return { model: field("model"), messages, max_tokens: Number(field("max_tokens")), temperature: Number(field("temperature")), stream: true };
  }

  function show(name, text) {
    document.getElementById("told-" + name).textContent = text;
  }

  function writeCalls() {
    const origin = location.origin;
    const json = JSON.stringify(body());
    document.getElementById("curl").textContent =
      `curl -N ${origin}/v1/chat/completions \\\n  -H "Authorization: Bearer $API_KEY" -H "Content-Type: application/json" \\\n  -d '${json.replaceAll("'", "'\\''")}'`;
    const { messages, model, max_tokens, temperature } = body();
    document.getElementById("python").textContent =
      `from openai import OpenAI\n\nclient = OpenAI(base_url="${origin}/v1", api_key="...")\nstream = client.chat.completions.create(\n    model=${JSON.stringify(model)},\n    messages=${JSON.stringify(messages)},\n    max_tokens=${max_tokens},\n    temperature=${temperature},\n    stream=True,\n)\nfor chunk in stream:\n    print(chunk.choices[0].delta.content or "", end="")`;
  }

  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  }

  async function talk() {
    running = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    answer.textContent = "";
    for (const name of ["first", "in", "cached", "out", "cost", "speed", "request"]) show(name, "–");
    said.textContent = "Waiting for the first token …";
    const began = performance.now();
    let first = null;
    let usage = null;
    let id = null;
    let last = null;
    try {
      const response = await fetch(form.action, {
        method: "POST",
        headers: { "content-type": "application/json", "x-form-token": field("form_token") },
        body: JSON.stringify(body()),
        signal: running.signal,
      });
      if (!response.ok) throw new Error(await refusal(response));
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        id = chunk.id || id;
        const text = chunk.choices && chunk.choices[0] && chunk.choices[0].delta && chunk.choices[0].delta.content;
        if (text) {
          if (first === null) { first = performance.now(); show("first", Math.round(first - began) + " ms"); said.textContent = "Answering …"; }
          last = performance.now();
          answer.append(text);
        }
        if (chunk.usage) usage = chunk.usage;
      }
      said.textContent = "Done.";
    } catch (error) {
      said.textContent = error.name === "AbortError" ? "Stopped: what was produced is charged." : error.message;
    } finally {
      running = null;
      send.disabled = false;
      stop.hidden = true;
    }
    if (usage) tell(usage, first, last);
    if (id) await link(id);
  }

  function tell(usage, first, last) {
    show("in", usage.prompt_tokens.toLocaleString("en-US"));
    show("cached", usage.prompt_tokens_details.cached_tokens.toLocaleString("en-US"));
    show("out", usage.completion_tokens.toLocaleString("en-US"));
    show("cost", "$" + usage.cost);
    if (first !== null && last > first) {
      show("speed", ((usage.completion_tokens - 1) / ((last - first) / 1000)).toFixed(1) + " tokens/s");
    }
  }

  async function link(id) {
    const anchor = document.createElement("a");
    anchor.href = form.dataset.requests + "/" + id;
    anchor.textContent = "record";
    document.getElementById("told-request").replaceChildren(anchor);
  }

  async function refusal(response) {
    const text = await response.text();
    try { return JSON.parse(text).error.message; } catch { return `The server answered ${response.status}.`; }
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); if (running === null) talk(); });
  form.addEventListener("input", writeCalls);
  form.elements.prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit(); });
  stop.addEventListener("click", () => running && running.abort());
  writeCalls();
})();
