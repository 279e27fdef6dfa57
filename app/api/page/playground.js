// The view "Playground": a streamed chat with its times, or a decision, and the same request as curl and Python.

import { call, events, key } from "/page/api.js";
import { element, seconds } from "/page/elements.js";
import { heading, showFigures } from "/page/figures.js";
import { showWaiting } from "/page/waiting.js";

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

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];

// Throws SyntaxError if a field is not valid JSON.
function parameters() {
  const given = { model: $("model").value };
  for (const name of NUMBERS) if ($(name).value !== "") given[name] = Number($(name).value);
  if ($("stop").value) given.stop = [$("stop").value];
  const tools = parsed("tools", Array.isArray, "a JSON list");
  if (tools) Object.assign(given, { tools, tool_choice: $("tool_choice").value });
  const schema = parsed("schema", (value) => value && typeof value === "object" && !Array.isArray(value), "a JSON object");
  if (schema) given.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return given;
}

const asked = () => parsed("questions", (value) => Array.isArray(value) && value.length, "a JSON list of questions");

function parsed(id, isRight, kind) {
  const text = $(id).value.trim();
  $(id).setAttribute("aria-invalid", "true");
  const value = text ? JSON.parse(text) : null;
  if (text && !isRight(value)) throw new SyntaxError(`should be ${kind}`);
  $(id).setAttribute("aria-invalid", "false");
  return value;
}

// Returns the calls of the last answer that have no result yet. The next message is the result of the first one.
function open() {
  const answer = messages.findLast((message) => message.role === "assistant");
  const done = messages.map((message) => message.tool_call_id);
  return (answer?.tool_calls || []).filter((each) => !done.includes(each.id));
}

const written = (prompt) => {
  const [first] = open();
  return first ? { role: "tool", tool_call_id: first.id, content: prompt } : { role: "user", content: prompt };
};

function body(prompt) {
  const system = $("system").value.trim();
  const all = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  if (prompt) all.push(written(prompt));
  else if (all.at(-1)?.role === "assistant") all.pop(); // show the request that was sent last
  return { ...parameters(), messages: all, stream: true };
}

// Returns the call that the form describes.
function request(prompt) {
  const questions = asked();
  if (!questions) return { path: "/v1/chat/completions", sent: body(prompt) };
  return { path: "/v1/decisions", sent: { model: $("model").value, input: prompt || "Hello", questions } };
}

async function ask(event) {
  event.preventDefault();
  const prompt = $("prompt").value.trim();
  if (!prompt || running || !showCode()) return;
  const { path, sent } = request(prompt);
  if (sent.questions) return decide(path, sent);
  messages.push(sent.messages.at(-1));
  add(sent.messages.at(-1).role, prompt);
  $("prompt").value = "";
  if (open().length) return askForResult();
  const place = add("assistant", "");
  const began = performance.now();
  const times = { first: 0, tokens: 0 };
  const answer = { role: "assistant", content: "", calls: [] };
  await run(place, answer, began, async (signal, headers, waiting) => {
    const response = await call(path, {
      body: { ...sent, stream_options: { include_usage: true, continuous_usage_stats: true } }, signal, headers,
    });
    waiting.takeHeaders(response.headers);
    times.replica = response.headers.get("x-carousel-replica") || "";
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const isMore = take(answer, chunk.choices?.[0]?.delta || {});
      if (isMore) times.last = performance.now();
      if (isMore && !times.first) times.first = times.last;
      times.tokens = chunk.usage?.completion_tokens ?? times.tokens;
      if (!isMore) continue;
      waiting.end();
      show(place, answer);
      showFigures($("speed"), speed(times, began));
      place.scrollIntoView({ block: "nearest" });
    }
  });
  const { calls, ...message } = answer;
  if (calls.length) messages.push({ ...message, content: message.content || null, tool_calls: calls });
  else if (message.content) messages.push(message);
  else messages.pop();
  showFigures($("speed"), []);
  if (times.first) place.append(cost(speed(times, began)));
  showCode();
  askForResult();
}

async function decide(path, sent) {
  add("user", sent.input);
  $("prompt").value = "";
  const place = add("assistant", "");
  const began = performance.now();
  await run(place, { content: "" }, began, async (signal, headers, waiting) => {
    const { answers, usage } = await (await call(path, { body: sent, signal, headers })).json();
    waiting.end();
    place.append(...answers.map((answer, number) => decision(sent.questions[number], answer)));
    place.append(cost([
      ["answer_time", seconds(performance.now() - began)], ["prompt_size", usage.input_tokens],
      ["prompt_cached", usage.input_tokens_details.cached_tokens],
    ]));
    place.scrollIntoView({ block: "nearest" });
  });
  showCode();
}

// Runs `work` until it finishes or is stopped. An error is shown after the answer so far. Until `work` ends the
// waiting, the message shows where the request is, found by the id in the headers.
async function run(place, answer, began, work) {
  running = new AbortController();
  setRunning(true);
  const id = `page-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;
  const waiting = showWaiting(place, id, began);
  try {
    await work(running.signal, { "x-request-id": id }, waiting);
    waiting.end();
    if (!place.textContent) place.firstChild.textContent = "(an answer without text)";
  } catch (error) {
    if (error.name !== "AbortError") {
      place.classList.add("error");
      place.firstChild.textContent = answer.content ? `${answer.content}\n\n${error.message}` : error.message;
    } else if (!answer.content && !answer.calls?.length) place.firstChild.textContent = "(stopped before the first token)";
  } finally {
    waiting.end();
  }
  running = null;
  setRunning(false);
}

// Returns an element that shows a question with the probability of each of its answers.
function decision({ instructions }, { name, probability, probabilities = [{ value: "yes", probability }] }) {
  const made = element("div", "decision");
  made.append(heading("probability"));
  made.prepend(element("b", "", typeof instructions === "string" ? instructions : name || ""));
  for (const { label, value, probability: share } of probabilities) {
    const bar = element("meter");
    bar.value = share;
    bar.ariaLabel = String(label ?? value);
    made.append(element("span", "", bar.ariaLabel), bar, element("span", "n", share.toFixed(3)));
  }
  return made;
}

// Adds one piece of an answer: text, or pieces of calls. Returns whether the piece contained anything.
function take(answer, { content, tool_calls: pieces = [] }) {
  answer.content += content || "";
  for (const piece of pieces) {
    const made = (answer.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    made.id ||= piece.id || "";
    made.function.name += piece.function?.name || "";
    made.function.arguments += piece.function?.arguments || "";
  }
  return Boolean(content || pieces.length);
}

function show(place, answer) {
  place.firstChild.textContent = answer.content;
  const shown = answer.calls.map(({ function: each }) => element("code", "call", `${each.name}(${each.arguments})`));
  place.replaceChildren(place.firstChild, ...shown);
}

function askForResult() {
  const [first] = open();
  $("prompt").placeholder = first
    ? `Write the result of ${first.function.name}(${first.function.arguments}).`
    : "Write a message. Enter sends it, Shift+Enter makes a new line.";
}

function speed({ first, last, tokens, replica }, began) {
  if (!first) return [];
  const after = (last - first) / 1000;
  return [
    ["first_token", seconds(first - began)], ["answer_tokens", tokens],
    ...(after > 0.1 ? [["answer_rate", ((tokens - 1) / after).toFixed(0)]] : []), ...(replica ? [["replica", replica]] : []),
  ];
}

function cost(figures) {
  const made = element("span", "cost");
  made.dataset.figures = "";
  showFigures(made, figures);
  return made;
}

function add(role, text) {
  const place = element("div", `message ${role}`);
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

// Shows the request as code. Returns whether the request is valid.
function showCode() {
  try {
    const { path, sent } = request($("prompt").value.trim() || (messages.length ? "" : "Hello"));
    $("code").textContent = language === "curl" ? asCurl(path, sent) : asPython(sent);
    $("forms-error").textContent = "";
    return true;
  } catch (error) {
    $("forms-error").textContent = error.message;
    $("forms").open = true;
    return false;
  }
}

function asCurl(path, sent) {
  const json = JSON.stringify(sent, null, 2).replaceAll("'", "'\\''");
  const auth = key.get() ? ' \\\n  -H "Authorization: Bearer $CAROUSEL_KEY"' : "";
  return `curl ${location.origin}${path} -N \\\n  -H "Content-Type: application/json"${auth} \\\n  -d '${json}'`;
}

function asPython(sent) {
  const { stream, ...given } = sent;
  const lines = Object.entries(given).map(([name, value]) => `    ${name}=${inPython(value)},`);
  const use = sent.questions
    ? ["decision = client.decisions.create(", ...lines, ")", "for answer in decision.answers:", "    print(answer)"]
    : [
      "stream = client.chat.completions.create(", ...lines, "    stream=True,", ")",
      "for chunk in stream:", '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
    ];
  const apiKey = key.get() ? 'os.environ["CAROUSEL_KEY"]' : '"none"';
  return [
    ...(key.get() ? ["import os", ""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${apiKey})`,
    ...use,
  ].join("\n");
}

function inPython(value, indent = "    ") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = Object.entries(value).map(([name, each]) => {
    const text = inPython(each, `${indent}    `);
    return `${indent}    ${Array.isArray(value) ? text : `${JSON.stringify(name)}: ${text}`},`;
  });
  const [first, last] = Array.isArray(value) ? "[]" : "{}";
  return inner.length ? [first, ...inner, `${indent}${last}`].join("\n") : first + last;
}

const EXAMPLES = {
  tools: [{
    type: "function",
    function: {
      name: "get_weather", description: "The weather in a city",
      parameters: { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"], additionalProperties: false },
    },
  }],
  schema: {
    type: "object",
    properties: { name: { type: "string", maxLength: 20 }, legs: { type: "integer", minimum: 0, maximum: 8 } },
    required: ["name", "legs"],
    additionalProperties: false,
  },
  questions: [
    { type: "predicate", instructions: "Is it about an animal?" },
    { type: "choice", instructions: "What is it?", choices: [{ value: "question" }, { value: "statement" }] },
  ],
};

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
    askForResult();
  });
  for (const id of ["prompt", "model", "system", "stop", "tools", "tool_choice", "schema", "questions", ...NUMBERS]) $(id).addEventListener("input", showCode);
  for (const [id, example] of Object.entries(EXAMPLES)) {
    $(`${id}-example`).addEventListener("click", () => {
      $(id).value = JSON.stringify(example, null, 2);
      showCode();
    });
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
