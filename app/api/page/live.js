// The view "Live": reads the events, maintains and draws a panel for each replica, and shows one request's timeline.

import { ApiError, call, events } from "/page/api.js";
import { draw, stayAt } from "/page/carousel.js";
import { demoSize } from "/page/demo.js";
import { element, palette, setText } from "/page/elements.js";
import { showFigures } from "/page/figures.js";
import { History } from "/page/history.js";
import { newPanel, updatePanel } from "/page/replica.js";
import { showTimeline } from "/page/request.js";
import { newSwitch } from "/page/scheduler.js";

const DELAY_MS = 350; // delay of the drawing, so that its data has arrived
const HIDDEN_MS = 30_000; // a hidden tab stops watching after this time
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
      // A missing key is reported above all views.
      if (error instanceof ApiError) notice(error.status === 401 ? "" : error.message);
      if (error.status === 401 || error.status === 403) return; // until another key is entered
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}

function say(text, kind) {
  const place = $("connection");
  setText(place, text);
  place.className = kind;
}

function notice(text) {
  $("notice").hidden = !text;
  setText($("notice"), text);
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
  $("pause").textContent = isPaused ? "Resume" : "Pause";
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
  if (!panels.has(key)) panels.set(key, newPanelOf(replica));
  const panel = panels.get(key);
  panel.replica = replica;
  return panel;
}

function newPanelOf(replica) {
  const canvas = element("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  const panel = newPanel(replica, canvas);
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

// Rebuild the list of panels when models or replicas were added or removed.
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
  const line = { root: element("div", "model"), decision: element("span", "dispatch"), switch: newSwitch(model.name) };
  line.decision.dataset.figures = "";
  line.root.append(element("b", "", model.name), line.switch, line.decision);
  return line;
}

function updateWords() {
  arrange();
  for (const model of history.models.values()) {
    const { reason, loads } = model.decision ?? { reason: "no request yet", loads: "" };
    showFigures(model.line.decision, [["last_dispatch", reason, "", loads && `The loads at that time: ${loads}`]]);
    for (const replica of model.replicas.values()) updatePanel(panelOf(replica), history, $("colour").value);
    const shown = [...model.replicas.values()].find((replica) => replica.state === "serving" && replica.view);
    if (shown) model.line.switch.show(shown.view);
  }
  showTimeline(history, view.selected);
  setText($("demo"), `Send ${demoSize(numSlots($("model").value))} demo requests`);
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
  if (at - drawnAt < 45 || $("live").hidden || document.hidden) return; // about 20 frames per second
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

// Returns the number of slots of all replicas of a model that accept requests.
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
