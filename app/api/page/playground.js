// The view "Playground": a chat, streamed, with its times, and the same request as curl and Python.

import { call, events, key } from "/page/api.js";

const $ = (id) => document.getElementById(id);
const messages = [];
let running = null;
let language = "curl";

export async function loadModels() {
  const chosen = $("model").value;
  const { data } = await (await call("/v1/models")).json();
  $("model").replaceChildren(...data.map((model) => new Option(model.id, model.id)));
  if (data.some((model) => model.id === chosen)) $("model").value = chosen;
  showCode();
}

function parameters() {
  const given = { model: $("model").value };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = $(name).value;
    if (value !== "") given[name] = Number(value);
  }
  return given;
}

function body(prompt) {
  const system = $("system").value.trim();
  const all = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  if (prompt) all.push({ role: "user", content: prompt });
  else if (all.at(-1)?.role === "assistant") all.pop(); // the request that was sent last
  return { ...parameters(), messages: all, stream: true };
}

async function ask(event) {
  event.preventDefault();
  const prompt = $("prompt").value.trim();
  if (!prompt || running) return;
  const sent = body(prompt);
  messages.push({ role: "user", content: prompt });
  add("user", prompt);
  $("prompt").value = "";
  const place = add("assistant", "");
  const began = performance.now();
  const times = { first: 0, tokens: 0 };
  running = new AbortController();
  setRunning(true);
  let text = "";
  try {
    const response = await call("/v1/chat/completions", {
      body: { ...sent, stream_options: { include_usage: true, continuous_usage_stats: true } }, signal: running.signal,
    });
    times.replica = response.headers.get("x-carousel-replica") || "";
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices?.[0]?.delta?.content || "";
      if (piece && !times.first) times.first = performance.now();
      if (piece) times.last = performance.now();
      text += piece;
      times.tokens = chunk.usage?.completion_tokens ?? times.tokens;
      place.firstChild.textContent = text;
      $("speed").textContent = speed(times, began);
      place.scrollIntoView({ block: "nearest" });
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      place.classList.add("error");
      place.firstChild.textContent = text ? `${text}\n\n${error.message}` : error.message;
    }
  }
  if (text) messages.push({ role: "assistant", content: text });
  else messages.pop();
  const cost = document.createElement("span");
  cost.className = "cost";
  cost.textContent = speed(times, began);
  place.append(cost);
  running = null;
  setRunning(false);
  showCode();
}

function speed({ first, last, tokens, replica }, began) {
  if (!first) return "";
  const after = (last - first) / 1000;
  const rate = after > 0.1 ? `, ${((tokens - 1) / after).toFixed(0)} tokens/s` : "";
  return `first token after ${Math.round(first - began)} ms, ${tokens} tokens${rate}${replica ? `, replica ${replica}` : ""}`;
}

function add(role, text) {
  const place = document.createElement("div");
  place.className = `message ${role}`;
  place.append(document.createTextNode(text));
  $("messages").append(place);
  place.scrollIntoView({ block: "nearest" });
  return place;
}

function setRunning(isRunning) {
  $("send").disabled = isRunning;
  $("stop").disabled = !isRunning;
}

// ---------------------------------------------------------------- the request as code

function showCode() {
  const sent = body($("prompt").value.trim() || (messages.length ? "" : "Hello"));
  $("code").textContent = language === "curl" ? asCurl(sent) : asPython(sent);
}

function asCurl(sent) {
  const json = JSON.stringify(sent, null, 2).replaceAll("'", "'\\''");
  const auth = key.get() ? ' \\\n  -H "Authorization: Bearer $CAROUSEL_KEY"' : "";
  return `curl ${location.origin}/v1/chat/completions -N \\\n  -H "Content-Type: application/json"${auth} \\\n  -d '${json}'`;
}

function asPython(sent) {
  const { messages: all, stream, ...given } = sent;
  const lines = Object.entries(given).map(([name, value]) => `    ${name}=${JSON.stringify(value)},`);
  const spoken = JSON.stringify(all, null, 4).split("\n").join("\n    ");
  const apiKey = key.get() ? 'os.environ["CAROUSEL_KEY"]' : '"none"';
  return [
    ...(key.get() ? ["import os", ""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${apiKey})`,
    "stream = client.chat.completions.create(", ...lines, `    messages=${spoken},`, "    stream=True,", ")",
    "for chunk in stream:", '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}

export function begin() {
  $("ask").addEventListener("submit", ask);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    messages.length = 0;
    $("messages").replaceChildren();
    showCode();
  });
  for (const id of ["prompt", "model", "system", "temperature", "top_p", "max_tokens", "seed"]) {
    $(id).addEventListener("input", showCode);
  }
  for (const name of ["curl", "python"]) {
    $(`as-${name}`).addEventListener("click", () => {
      language = name;
      for (const each of ["curl", "python"]) $(`as-${each}`).setAttribute("aria-pressed", String(each === name));
      showCode();
    });
  }
  $("copy").addEventListener("click", () => navigator.clipboard?.writeText($("code").textContent));
}
