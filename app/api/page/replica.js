// The panel of one replica: its state, its figures and its queue, next to its picture.

import { layOut } from "/page/carousel.js";
import { element, seconds, setText } from "/page/elements.js";
import { heading, rove, showFigures } from "/page/figures.js";

const STATES = {
  serving: "", lost: "lost: its connection broke; its requests resume elsewhere", leaving: "leaving: finishing its requests", gone: "gone",
};

const SLEEP = { asleep: "asleep", queued: "asleep: waiting for memory of other models", waking: "waking" };

const LABELS = ["slots", "queue_strip", "kv_blocks", "step_time", "step_tokens"]; // from top to bottom

// The picture is drawn on `canvas`. The words next to its strips are elements, so they can have explanations.
export function newPanel(replica, canvas) {
  const root = element("section", "replica");
  root.setAttribute("aria-label", `replica ${replica.id}`);
  const title = element("div", "title");
  const [head, dispatch] = [element("div", "head"), element("div", "dispatch")];
  const [picture, labels] = [element("div", "picture"), element("div", "labels")];
  root.dataset.figures = "";
  labels.append(...LABELS.map((name) => heading(name)));
  picture.append(canvas, labels);
  const queue = newQueue();
  const stage = element("div", "stage");
  stage.append(picture, queue.root);
  root.append(title, head, dispatch, stage);
  rove(root);
  return { root, title, head, dispatch, labels, canvas, queue, replica };
}

// ---------------------------------------------------------------- figures

export function updatePanel({ root, title, head, dispatch, labels, queue, canvas, replica }, history, kind) {
  root.className = `replica ${replica.state}`;
  const isThere = replica.state === "serving" || replica.state === "leaving";
  const { view: seen, facts } = isThere ? replica : { view: null, facts: replica.facts };
  const words = [STATES[replica.state] ?? replica.state, isThere ? SLEEP[facts.sleep] ?? "" : ""].filter(Boolean).join(", ");
  if (title.dataset.text !== words) {
    title.dataset.text = words;
    title.replaceChildren(element("span", "id", replica.id), element("span", "state", words));
  }
  showFigures(head, figuresOf(replica, seen, facts, history));
  const label = `Slots of ${replica.id} over time: ${[...head.children].map((each) => each.textContent).join(", ")}`;
  if (canvas.ariaLabel !== label) canvas.ariaLabel = label;
  layOut(canvas, labels, replica);
  showFigures(dispatch, [["last_request", facts.last_dispatch || "none from this process of the service yet"]]);
  updateQueue(queue, seen, history, kind);
}

function figuresOf(replica, seen, facts, history) {
  const failed = Object.keys(facts.backends_failed ?? {}).join(", ");
  const general = [
    facts.group && ["group", facts.group], facts.backend && ["backend", facts.backend],
    failed && ["backends_failed", failed, "bad"],
  ];
  if (!seen) return general.filter(Boolean);
  const isEncoder = !seen.num_blocks; // it has no KV memory and generates no tokens
  const bubbles = Math.round(bubblesOf(replica, history.at) * 100);
  return [
    ["running", `${seen.num_running} of ${seen.max_running}`], ["waiting", counted(seen.num_waiting)],
    [isEncoder ? "prompt_rate" : "output_rate", counted(Math.round(rateOf(replica, isEncoder, history.at)))],
    ["bubbles", bubbles, bubbles ? "warn" : ""],
    facts.last_dispatch !== undefined && ["load", counted(facts.prefill_tokens + facts.decode_tokens)],
    facts.tokens_per_s && ["speed", counted(Math.round(facts.tokens_per_s))],
    ["scheduling", `${seen.strategy}, ${seen.policy}`], ...general,
    ...(seen.tuning ? tuned(seen) : []), seen.settings && ["settings", seen.settings],
  ].filter(Boolean);
}

const counted = (number) => number.toLocaleString("en");

// Returns the tokens per second over the last three seconds.
function rateOf(replica, isEncoder, now) {
  const recent = replica.samples.filter((each) => each.num_steps && each.at > now - 3000);
  const tokens = recent.reduce((sum, each) => sum + (isEncoder ? each.num_tokens : each.num_drawn_tokens), 0);
  return recent.length ? tokens / Math.max(1, (now - recent[0].at) / 1000 + 0.2) : 0;
}

// Returns the limits that the tuner chose, and the measured targets.
function tuned({ tuning, max_step_tokens: tokens, prefill_chunk_tokens: chunk }) {
  const kind = tuning.is_missed ? "warn" : "";
  return [
    ["tuning", tuning.reason + (tuning.is_missed ? ", missing a target" : ""), kind], ["max_step_tokens", tokens],
    ["prefill_chunk", chunk], ["ttft_p99", seconds(tuning.ttft_p99_ms), kind], ["itl_p99", seconds(tuning.itl_p99_ms), kind],
  ];
}

// Returns the share of slots that no request used in steps of the last ten seconds while the strategy let none join.
function bubblesOf(replica, now) {
  let all = 0;
  let used = 0;
  for (const each of replica.samples) {
    if (!each.num_steps || each.reason !== "strategy" || each.at < now - 10_000) continue;
    all += each.num_steps * each.slots;
    used += each.num_sequences;
  }
  return all ? 1 - used / all : 0;
}

// ---------------------------------------------------------------- the queue

const REASONS = {
  slots: "all slots are in use", blocks: "not enough memory", budget: "the step's token budget is used up",
  strategy: "the strategy lets no request join yet", result: "its last token is being sampled",
};

const SHORT_REASONS = { slots: "a slot", blocks: "memory", budget: "budget", strategy: "strategy", result: "its token" };

function newQueue() {
  const root = element("div", "queue");
  const [title, number, first, list] = [element("h3"), element("span"), element("div", "first"), element("ol")];
  title.append(heading("queue"), number);
  const columns = element("div", "columns-of-queue");
  columns.append(...["tenant", "waits_for", "expected"].map((name) => heading(name)));
  root.append(title, first, columns, list);
  return { root, number, first, columns, list };
}

function updateQueue({ root, number, first, columns, list }, seen, history, kind) {
  const waiting = seen?.waiting ?? [];
  root.hidden = !seen;
  setText(number, seen?.num_waiting ? `: ${counted(seen.num_waiting)} request${seen.num_waiting === 1 ? "" : "s"}` : ": empty");
  setText(first, seen?.num_waiting ? `the first is waiting: ${REASONS[seen.wait_reason] || "for the next step"}` : "");
  columns.hidden = !waiting.length;
  const rows = waiting.map((each, index) => rowOf(each, index, seen, history.hue(kind, each)));
  if (seen && seen.num_waiting > waiting.length) rows.push(element("li", "", `and ${counted(seen.num_waiting - waiting.length)} more`));
  list.replaceChildren(...rows);
}

function rowOf(entry, index, seen, hue) {
  const row = element("li");
  const dot = element("span", "dot");
  dot.style.background = `hsl(${hue} 55% 55%)`;
  // No request overtakes the one before it, so only the first waits for anything else.
  const why = index ? `${index} before it` : SHORT_REASONS[seen.wait_reason] || "the next step";
  const expected = entry.expected_ms ? `≈ ${seconds(entry.expected_ms)}` : index ? "–" : "next";
  row.append(dot, element("span", "", entry.tenant || entry.request_id.slice(0, 12)), element("span", "", why), element("span", "", expected));
  row.title = `${entry.request_id}: waiting for ${seconds(entry.arrived_ms)}, ${entry.num_prompt_tokens} prompt tokens`
    + (entry.num_preemptions ? `, preempted ${entry.num_preemptions} times` : "");
  return row;
}
