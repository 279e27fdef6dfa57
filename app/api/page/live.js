// The view "Live": reads the events, keeps a panel for each replica, draws, and shows one request's timeline.

import { ApiError, call, events } from "/page/api.js";
import { draw, stayAt } from "/page/carousel.js";
import { demoSize } from "/page/demo.js";
import { element, palette, seconds } from "/page/elements.js";
import { History } from "/page/history.js";
import { showTimeline } from "/page/request.js";
import { newSwitch } from "/page/scheduler.js";

const DELAY_MS = 350; // drawn so late, so that what is drawn has arrived
const HIDDEN_MS = 30_000; // a hidden tab stops to watch after this
const history = new History();
const view = { isPaused: false, pausedAt: 0, selected: null };
const $ = (id) => document.getElementById(id);

// ---------------------------------------------------------------- events

let stream = null;

export async function watch() {
  stream?.abort();
  const own = (stream = new AbortController());
  let wait = 0;
  while (!own.signal.aborted) {
    try {
      const response = await call(`/admin/live?after=${history.at}`, { signal: own.signal });
      let fields = null;
      for await (const { name, data } of events(response)) {
        if (own.signal.aborted) return;
        if (name === "fields") fields = JSON.parse(data);
        else history.take(JSON.parse(data), fields);
        wait = 0;
        say("live", "on");
        notice("");
      }
    } catch (error) {
      if (own.signal.aborted) return;
      wait = Math.min(wait ? wait * 2 : 500, 5000);
      say(error instanceof ApiError ? `refused (${error.status})` : "not connected", "off");
      if (error instanceof ApiError) notice(explained(error));
      if (error.status === 401 || error.status === 403) return; // until another key is given
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}

function explained(error) {
  if (error.status === 401) return "The live view needs an admin's API key: write it into the field at the top.";
  if (error.status === 403) return `The live view is for administrators: ${error.message}`;
  return error.message;
}

function say(text, kind) {
  const place = $("connection");
  if (place.textContent !== text) place.textContent = text;
  place.className = kind;
}

function notice(text) {
  $("notice").hidden = !text;
  if ($("notice").textContent !== text) $("notice").textContent = text;
}

let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => stream?.abort(), HIDDEN_MS);
  else if (stream?.signal.aborted) watch();
});

// ---------------------------------------------------------------- time

function range() {
  const to = (view.isPaused ? view.pausedAt : history.now() - DELAY_MS) - Number($("back").value) * 1000;
  return { from: to - Number($("window").value) * 1000, to };
}

function pause(isPaused) {
  view.isPaused = isPaused;
  view.pausedAt = history.now() - DELAY_MS;
  $("pause").setAttribute("aria-pressed", String(isPaused));
  $("pause").textContent = isPaused ? "Go on" : "Pause";
  if (!isPaused) goBack(0);
}

function goBack(seconds) {
  const back = Math.max(0, Math.min(300, seconds));
  if (back && !view.isPaused) pause(true);
  $("back").value = String(back);
  $("back-s").textContent = back ? `${back} s` : "now";
}

// ---------------------------------------------------------------- panels

const panels = new Map(); // by replica

function panelOf(replica) {
  const key = `${replica.model}/${replica.id}`;
  if (!panels.has(key)) panels.set(key, newPanel(replica));
  const panel = panels.get(key);
  panel.replica = replica;
  return panel;
}

function newPanel(replica) {
  const root = element("section", "replica");
  const head = element("div", "head");
  const stage = element("div", "stage");
  const canvas = element("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  const queue = element("div", "queue");
  const dispatch = element("div", "decision");
  stage.append(canvas, queue);
  root.append(head, dispatch, stage);
  const panel = { root, head, canvas, queue, dispatch, replica };
  canvas.addEventListener("click", (event) => select(stayAt(canvas, panel.replica, event, range())?.id ?? null));
  canvas.addEventListener("keydown", (event) => move(event, panel.replica));
  return panel;
}

function move(event, replica) {
  const step = Number($("window").value) / 10;
  if (event.key === "ArrowLeft") goBack(Number($("back").value) + step);
  else if (event.key === "ArrowRight") goBack(Number($("back").value) - step);
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const { from, to } = range();
    const shown = replica.stays.filter((stay) => stay.joined < to && (stay.left ?? to) > from);
    shown.sort((one, other) => one.slot - other.slot || one.joined - other.joined);
    const now = shown.findIndex((stay) => stay.id === view.selected);
    const next = shown.at((now + (event.key === "ArrowDown" ? 1 : -1)) % shown.length);
    if (next) select(next.id);
  } else if (event.key === " ") pause(!view.isPaused);
  else return;
  event.preventDefault();
}

function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// Rebuild the list of panels when models or replicas have come or gone.
let shape = "";
function arrange() {
  const models = [...history.models.values()];
  const byState = (model) => [...model.replicas.values()].sort((one, other) => (one.goneAt ? 1 : 0) - (other.goneAt ? 1 : 0));
  const now = models.map((model) => `${model.name}:${byState(model).map((each) => each.id)}`).join(";");
  if (now === shape) return;
  shape = now;
  for (const [key, panel] of panels) if (!history.replicas().includes(panel.replica)) panels.delete(key);
  const parts = [];
  for (const model of models) {
    model.line ??= newLine(model);
    parts.push(model.line.root, ...byState(model).map((replica) => panelOf(replica).root));
  }
  $("fleet").replaceChildren(...parts);
}

function newLine(model) {
  const line = { root: element("div", "model"), decision: element("span", "decision"), switch: newSwitch(model.name) };
  line.root.append(element("b", "", model.name), line.switch, line.decision);
  return line;
}

const STATES = {
  serving: "", lost: "lost: its stream broke; its requests go on elsewhere", leaving: "leaving: it ends what it has", gone: "gone",
};

const SLEEP = { asleep: "asleep", queued: "asleep: it waits for the memory of other models", waking: "waking" };

function updateWords() {
  arrange();
  for (const model of history.models.values()) {
    const why = model.decision ? `last dispatch: ${model.decision.reason}` : "no request yet";
    const place = model.line.decision;
    setText(place, why);
    place.title = model.decision?.loads || "";
    for (const replica of model.replicas.values()) updateHead(panelOf(replica));
    const shown = [...model.replicas.values()].find((replica) => replica.state === "serving" && replica.view);
    if (shown) model.line.switch.show(shown.view);
  }
  showTimeline(history, view.selected);
  setText($("demo"), `Send ${demoSize(numSlots($("model").value))} demo requests`);
}

function updateHead({ root, head, queue, dispatch, canvas, replica }) {
  root.className = `replica ${replica.state}`;
  const isThere = replica.state === "serving" || replica.state === "leaving";
  const { view: seen, facts } = isThere ? replica : { view: null, facts: replica.facts };
  const recent = replica.samples.filter((each) => each.num_steps && each.at > history.at - 3000);
  const isEncoder = seen && !seen.num_blocks; // it has no KV memory and draws no tokens
  const tokens = recent.reduce((sum, each) => sum + (isEncoder ? each.num_tokens : each.num_drawn_tokens), 0);
  const span = recent.length ? Math.max(1, (history.at - recent[0].at) / 1000 + 0.2) : 1;
  const bubbles = Math.round(bubblesOf(replica) * 100);
  const failed = Object.keys(facts.backends_failed ?? {}).join(", "); // faster code for its GPU
  const parts = [
    ["id", replica.id], ["state", STATES[replica.state] ?? replica.state], ["i", facts.group ? `group ${facts.group}` : ""],
    ["state", isThere ? SLEEP[facts.sleep] ?? "" : ""],
    ["i", seen ? `${seen.strategy}, ${seen.policy}` : ""],
    ["n", seen ? `${seen.num_running} of ${seen.max_running} running` : ""],
    ["n", seen?.num_waiting ? `${seen.num_waiting} waiting` : ""],
    ["n", seen ? `${Math.round(tokens / span)} ${isEncoder ? "prompt tokens/s" : "tokens/s"}` : ""],
    ["n", seen && facts.tokens_per_s ? `speed ${Math.round(facts.tokens_per_s)}` : ""],
    ["n", seen && facts.last_dispatch !== undefined ? `load ${facts.prefill_tokens + facts.decode_tokens} tokens` : ""],
    ["i", facts.backend ? `backend ${facts.backend}` : ""],
    ["why", failed ? `${failed} failed` : ""],
    ["i", seen?.settings ? `settings ${seen.settings}` : ""],
    ["n", seen?.tuning ? tuned(seen) : ""],
    [bubbles ? "why bubbles" : "n bubbles", seen ? `bubbles ${bubbles} %${bubbles ? ": slots empty while requests wait for the batch" : ""}` : ""],
  ].filter(([, text]) => text);
  const text = parts.map((each) => each.join()).join("|");
  if (head.dataset.text !== text) {
    head.dataset.text = text;
    head.replaceChildren(...parts.map(([kind, words]) => element(kind === "i" ? "i" : "span", kind, words)));
    canvas.setAttribute("aria-label", `Slots over time: ${parts.map((each) => each[1]).join(", ")}`);
  }
  setText(dispatch, facts.last_dispatch ? `last request here: ${facts.last_dispatch}` : "no request of this ingress yet");
  updateQueue(queue, seen);
}

// The limits that the tuner chose, and how the targets are held.
function tuned({ tuning, max_step_tokens: tokens, prefill_chunk_tokens: chunk, max_running: running }) {
  const held = `first token p99 ${seconds(tuning.ttft_p99_ms)}, gaps p99 ${Math.round(tuning.itl_p99_ms)} ms`;
  return `tuned by ${tuning.reason}: ${tokens} tokens a step, chunk ${chunk}, ${running} running; ${held}${tuning.is_missed ? ", missed" : ""}`;
}

// The share of slots that no request used in steps of the last ten seconds, while the strategy let none join.
function bubblesOf(replica) {
  let all = 0;
  let used = 0;
  for (const each of replica.samples) {
    if (!each.num_steps || each.reason !== "strategy" || each.at < history.at - 10_000) continue;
    all += each.num_steps * each.slots;
    used += each.num_sequences;
  }
  return all ? 1 - used / all : 0;
}

const REASONS = {
  slots: "all slots are in use", blocks: "memory is short", budget: "the step's token budget is used up",
  strategy: "the strategy lets none join now", result: "its last token is being drawn",
};

const SHORT_REASONS = { slots: "slots", blocks: "memory", budget: "budget", strategy: "strategy", result: "its token" };

function updateQueue(queue, seen) {
  const waiting = seen?.waiting || [];
  const list = element("ol");
  waiting.forEach((each, index) => {
    const row = element("li");
    const dot = element("span", "dot");
    dot.style.background = `hsl(${history.hue($("colour").value, each)} 55% 55%)`;
    const expected = each.expected_ms ? `≈${seconds(each.expected_ms)}` : "next";
    // None overtakes the one before it: only the first waits for anything else.
    const why = index ? `behind ${index}` : SHORT_REASONS[seen.wait_reason] || "next step";
    row.append(dot, element("span", "", each.tenant || each.request_id.slice(0, 12)), element("span", "", why), element("span", "", expected));
    row.title = `${each.request_id}: has waited ${seconds(each.arrived_ms)}, ${each.num_prompt_tokens} prompt tokens`
      + (each.num_preemptions ? `, preempted ${each.num_preemptions} times` : "");
    list.append(row);
  });
  const parts = seen ? [element("h3", "", seen.num_waiting ? `Queue: ${seen.num_waiting}` : "Queue: empty")] : [];
  if (seen?.num_waiting) parts.push(element("div", "decision", `the first waits: ${REASONS[seen.wait_reason] || "for the next step"}`));
  if (seen && seen.num_waiting > waiting.length) list.append(element("li", "", `and ${seen.num_waiting - waiting.length} more`));
  queue.replaceChildren(...parts, list);
}

// ---------------------------------------------------------------- one request

function select(id) {
  view.selected = id;
  $("request").hidden = !id;
  showTimeline(history, id);
}

function close() {
  if ($("request").contains(document.activeElement)) document.querySelector(".replica canvas")?.focus();
  select(null);
}

// ---------------------------------------------------------------- drawing

let drawnAt = 0;
function frame(at) {
  requestAnimationFrame(frame);
  if (at - drawnAt < 45 || $("live").hidden || document.hidden) return; // some 20 pictures a second
  drawnAt = at;
  const times = range();
  const colours = palette();
  const kind = $("colour").value;
  for (const { canvas, replica, root } of panels.values()) {
    if (!root.isConnected) continue;
    const { top, bottom } = canvas.getBoundingClientRect();
    if (bottom < 0 || top > window.innerHeight) continue;
    draw(canvas, replica, { history, ...times, kind, selected: view.selected, colours });
  }
}

// Of all replicas of a model that take requests.
export function numSlots(model) {
  const serving = history.replicas().filter((replica) => replica.model === model && replica.state === "serving");
  return serving.reduce((sum, replica) => sum + (replica.facts.max_running || 0), 0);
}

export function begin() {
  $("pause").addEventListener("click", () => pause(!view.isPaused));
  $("request-close").addEventListener("click", close);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && view.selected) close(); });
  $("back").addEventListener("input", () => goBack(Number($("back").value)));
  setInterval(() => { if (!$("live").hidden && !document.hidden) updateWords(); }, 200);
  requestAnimationFrame(frame);
  watch();
}

export { history };
