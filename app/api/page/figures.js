// The figures that the page shows. `heading`, `column` and `figure` show only figures of this table.

import { element, setText } from "/page/elements.js";

// For each group, the label of each figure, its unit ("" for names, words, and values that include their unit), and its
// explanation.
const GROUPS = {
  "A replica": {
    group: ["group", "", "The replica's group in an A/B test. A client can select a group with the header x-carousel-group."],
    scheduling: ["scheduling", "", "The strategy and the policy in force. The strategy decides when waiting requests may join the batch, and the policy decides which request is first."],
    running: ["running", "slots", "The number of requests in the replica's batch, and its number of slots. Each request in the batch occupies one slot."],
    waiting: ["waiting", "requests", "The number of requests in the replica's queue. The replica has accepted these requests, but they have no slot yet."],
    output_rate: ["output", "tokens/s", "The output tokens that the replica generated per second, over the last three seconds."],
    prompt_rate: ["prompts", "tokens/s", "The prompt tokens that the replica processed per second, over the last three seconds. The model generates no output tokens."],
    speed: ["speed", "tokens/s", "The prompt and output tokens that the replica processes per second in steps of 64 tokens. The replica measures its speed continuously, and faster replicas receive more requests."],
    load: ["load", "tokens", "The replica's remaining work: prompt tokens that it has not processed yet, and output tokens that it is expected to generate. A new request goes to the replica with the lowest load relative to its speed."],
    backend: ["backend", "", "The code that runs the model on this replica's processor or GPU."],
    backends_failed: ["failed backends", "", "Faster backends for this GPU that do not work here. See the replica's log for the reason."],
    settings: ["settings", "", "The version of all scheduling settings: the preset, the strategy, the policy, and a digest of all values. Figures measured under the same version are comparable."],
    bubbles: ["bubbles", "%", "The share of slot time that no request used in the last ten seconds, while requests were waiting and the strategy let none of them join."],
    tuning: ["limits set by", "", "The reason for the step limits that the tuner has chosen: the configured bounds, the target for gaps (itl), the target for first tokens (ttft), memory, or an unreachable target."],
    max_step_tokens: ["step limit", "tokens", "The maximum number of tokens in one step, as set by the tuner."],
    prefill_chunk: ["chunk limit", "tokens", "The maximum number of one prompt's tokens in one step, as set by the tuner."],
    ttft_p99: ["first token p99", "", "99 of 100 requests received their first token within this time, over the last half minute."],
    itl_p99: ["gap p99", "", "99 of 100 gaps between two tokens of a request were shorter, over the last half minute."],
    last_dispatch: ["last dispatch", "", "Where the last request for this model was sent, and why: the dispatch policy, the replica, and the rule that chose the replica."],
    last_request: ["last request here", "", "Why this replica received its last request: the rule, and the replica's load. The load counts prompt tokens and expected output tokens, including those of the new request, and is scaled by the replica's speed relative to the usual speed."],
  },
  "The picture of a replica": {
    slots: ["slots", "", "Each line is one slot of the replica's batch, and each colour is one request. Time runs to the right."],
    queue_strip: ["queue", "requests", "The number of requests waiting for a slot, over time."],
    kv_blocks: ["KV blocks", "blocks", "The blocks of KV memory, over time. Running requests own blocks (strong colour). Cached blocks (pale colour) contain prefixes that new requests may share. Free blocks are empty."],
    step_time: ["step time", "ms", "The duration of one step of the batch, in milliseconds: the mean (strong colour) and the longest (grey) in each fifth of a second."],
    step_tokens: ["step size", "tokens", "The tokens in one step, relative to the step's budget: output tokens (strong colour), with prompt tokens on top (pale colour)."],
  },
  "The queue of a replica": {
    queue: ["Queue", "", "The requests without a slot, in the order in which they would currently get one."],
    tenant: ["tenant", "", "The request's tenant: the name of its API key, or the field user of its body. A request without a tenant shows its id."],
    waits_for: ["waits for", "", "The reason why the request cannot join the batch yet. No request overtakes the one before it."],
    expected: ["expected", "", "The time until the request is expected to get a slot, estimated from the replica's speed."],
  },
  "One request": {
    request_id: ["id", "", "The request's id in logs and responses."],
    tenant_class: ["tenant, class", "", "The request's tenant and class. Under the policy priority, smaller numbers run first. Background requests use only idle slots."],
    prompt: ["prompt", "tokens", "The length of the prompt. Cached tokens were already in KV memory and are not recomputed."],
    output: ["output", "tokens", "The tokens generated so far."],
    memory: ["memory", "blocks", "The blocks of KV memory that the request owns."],
    queue_time: ["queue", "", "The time from the request's arrival at the replica until its first slot."],
    moved: ["then", "", "Why the request lost its slot, and how long it waited for the next one."],
    stay: ["slot", "", "One stay in a slot of a replica: the time for the prompt, and the time for generating output."],
    gaps: ["gaps between tokens", "", "The times between consecutive output tokens, as a client of the stream receives them."],
  },
  "Tables for administrators": {
    key: ["key", "", "The name of the API key, as in the keys file."],
    model: ["model", "", "The model's name in requests."],
    requests: ["requests", "", "The calls that have ended this month."],
    prompt_tokens: ["prompt", "tokens", "All prompt tokens, including cached tokens."],
    cached_tokens: ["of them cached", "tokens", "The prompt tokens that were already in KV memory."],
    output_tokens: ["output", "tokens", "All generated tokens."],
    cost: ["cost", "", "The cost at the model's prices when the call ended, in the currency of these prices. Without prices, the cost is 0."],
    replicas: ["replicas", "", "The model's current number of replicas."],
    wanted: ["wanted", "replicas", "The number of replicas that autoscaling wants for the model."],
    why: ["why", "", "The reason for the wanted number."],
  },
  "The playground": {
    answer_time: ["time", "", "The time from the click until the whole answer had arrived, in this browser."],
    first_token: ["first token after", "", "The time from the click until the first token had arrived, in this browser."],
    answer_tokens: ["output", "tokens", "The tokens in the answer, as counted by the service."],
    answer_rate: ["rate", "tokens/s", "The tokens per second after the first token, in this browser."],
    prompt_size: ["prompt", "tokens", "The tokens in the prompt, including the chat template."],
    prompt_cached: ["cached", "tokens", "The prompt tokens that were already in KV memory."],
    replica: ["replica", "", "The replica that answered."],
    probability: ["probability", "", "The probability that the model assigns to each answer, from 0 to 1. The probabilities for one question add up to 1."],
  },
  "Batches": {
    created: ["created", "", "When the batch was created, in this browser's time zone, and how long the batch took, once it has ended."],
    batch_id: ["batch", "", "The batch's id in the API, in logs and in webhooks."],
    batch_model: ["model", "", "The model of all requests in the batch. The requests in one file may also use several models."],
    progress: ["progress", "", "The number of the file's requests that have ended, and the number of all requests. Failed requests are in the errors file."],
    batch_state: ["state", "", "The batch's status in the API. A paused batch is waiting for its storage."],
    webhook: ["webhook", "", "The message about the end of the batch: waiting for the end, pending, delivered, or given up after a day of attempts."],
    actions: ["actions", "", "Results are the answers, one JSON object per line. Errors are the requests that failed or did not run."],
  },
};

export const FIGURES = Object.assign({}, ...Object.values(GROUPS));

// Returns the word for a figure. Its explanation appears under the pointer and on focus, and screen readers read it.
// `label` replaces the label from the table.
export function heading(name, label = "") {
  if (!Object.hasOwn(FIGURES, name)) throw new Error(`figures.js does not explain the figure ${name}`);
  const [usual, , explanation] = FIGURES[name];
  const word = element("abbr", "", label || usual);
  word.dataset.figure = name;
  word.setAttribute("role", "term");
  word.setAttribute("aria-description", explanation);
  word.tabIndex = 0;
  return word;
}

// Returns the header cell of a table's column or row.
export function column(name, label = "") {
  const made = element("th");
  made.append(heading(name, label));
  if (FIGURES[name][1]) made.append(` ${FIGURES[name][1]}`);
  return made;
}

export function figure(name, value = "") {
  const made = element("span", "figure");
  made.dataset.of = name;
  made.append(heading(name), " ", element("span", "value", String(value)));
  const [, unit] = FIGURES[name];
  if (unit) made.append(" ", element("span", "unit", unit));
  return made;
}

// Shows each [name, value, kind, more]. Elements are reused when their values change, so the focus stays. `more` is
// appended to the explanation.
export function showFigures(place, figures) {
  const known = new Map([...place.children].map((each) => [each.dataset.of, each]));
  const shown = figures.map(([name, value, kind = "", more = ""]) => {
    const made = known.get(name) ?? figure(name);
    made.className = kind ? `figure ${kind}` : "figure";
    setText(made.querySelector(".value"), String(value));
    const explanation = more ? `${FIGURES[name][2]} ${more}` : FIGURES[name][2];
    const word = made.firstChild;
    if (word.ariaDescription !== explanation) word.ariaDescription = explanation;
    return made;
  });
  keepFocus(place, shown);
}

// Replaces the children of `place` with `shown` if they differ, and keeps the focus.
export function keepFocus(place, shown) {
  if (shown.length === place.children.length && shown.every((each, index) => each === place.children[index])) return;
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  place.replaceChildren(...shown);
  if (focused?.isConnected) focused.focus();
  rove(place);
}

// Tab moves to one word of a group, and the arrow keys move between its words.
export function rove(place, chosen = null) {
  const words = wordsOf(place.closest("[data-figures]") ?? place);
  const one = chosen ?? words.find((each) => each.tabIndex === 0) ?? words[0];
  for (const each of words) each.tabIndex = each === one ? 0 : -1;
}

const wordsOf = (group) => [...group.querySelectorAll("abbr[data-figure]")];

// ---------------------------------------------------------------- explanations

const tip = element("div");
tip.id = "tip";
tip.setAttribute("aria-hidden", "true"); // screen readers read the word's description
tip.hidden = true;
let told = null; // the word that is currently explained

function explain(word) {
  told = word;
  tip.hidden = !word;
  if (!word) return;
  tip.textContent = word.ariaDescription;
  const { left, top, bottom } = word.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(8, Math.min(left, document.documentElement.clientWidth - width - 8))}px`;
  tip.style.top = `${bottom + 6 + height <= window.innerHeight ? bottom + 6 : Math.max(8, top - height - 6)}px`;
}

function move(event) {
  const word = wordAt(event);
  if (!word) return;
  if (event.key === "Escape" && told) {
    explain(null);
    event.stopPropagation(); // the panel around the word stays open
  }
  const group = word.closest("[data-figures]");
  const words = group ? wordsOf(group).filter((each) => each.checkVisibility()) : [word];
  const now = words.indexOf(word);
  const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: -1 }[event.key];
  if (next === undefined || words.length < 2) return;
  event.preventDefault();
  const chosen = words.at(next % words.length);
  rove(group, chosen);
  chosen.focus();
}

const wordAt = (event) => event.target.closest?.("abbr[data-figure]") ?? null;

export function begin() {
  document.body.append(tip);
  const focused = () => (document.activeElement?.matches("abbr[data-figure]") ? document.activeElement : null);
  document.addEventListener("pointerover", (event) => {
    const word = wordAt(event) ?? focused();
    if (word !== told) explain(word);
  });
  document.addEventListener("focusin", (event) => explain(wordAt(event)));
  document.addEventListener("focusout", () => explain(null));
  // The explanation of the focused word moves with the word, because setting the focus may have scrolled the page.
  const scrolled = () => { if (told) explain(focused()); };
  document.addEventListener("scroll", scrolled, { capture: true, passive: true });
  document.addEventListener("keydown", move, { capture: true });
  const list = document.getElementById("glossary");
  for (const [group, figures] of Object.entries(GROUPS)) {
    list.append(element("h3", "", group), element("dl"));
    list.lastChild.append(...Object.values(figures).flatMap(([label, unit, explanation]) => [
      element("dt", "", unit ? `${label} (${unit})` : label), element("dd", "", explanation),
    ]));
  }
}
