// The figures that the page shows. `heading`, `column` and `figure` show only figures of this table.

import { element, setText } from "/page/elements.js";

// By group: the label of each figure, its unit ("" for names, words, and values with units of their own), and its explanation.
const GROUPS = {
  "A replica": {
    group: ["group", "", "The replica's group of an A/B trial. A client may name the group in the header x-carousel-group."],
    scheduling: ["scheduling", "", "The strategy and the policy in force. The strategy says when waiting requests may join the batch, the policy which request goes first."],
    running: ["running", "slots", "The requests that the replica computes now, of the slots that the replica has. Each request in the batch takes one slot."],
    waiting: ["waiting", "requests", "The requests in the replica's queue: the replica has accepted them, and they have no slot yet."],
    output_rate: ["output", "tokens/s", "The output tokens that the replica has generated each second, over the last three seconds."],
    prompt_rate: ["prompts", "tokens/s", "The prompt tokens that the replica has read each second, over the last three seconds. The model generates no output tokens."],
    speed: ["speed", "tokens/s", "The tokens, of prompts and outputs together, that the replica computes each second in steps of 64 tokens. The replica measures this speed all the time, and requests are spread over the replicas by their speeds."],
    load: ["load", "tokens", "The work that the replica still has: the prompt tokens that it has not read, and the output tokens that are expected to come. Another request goes to the replica with the least load for its speed."],
    backend: ["backend", "", "The code that computes the model on this replica's processor or GPU."],
    backends_failed: ["failed backends", "", "Faster code for this GPU that does not work here. The log of the replica has the reason."],
    settings: ["settings", "", "The version of all settings of scheduling: the preset, the strategy, the policy, and a digest of all values. Figures under the same version may be compared."],
    bubbles: ["bubbles", "%", "The share of slot time that no request used in the last ten seconds, while requests waited and the strategy let none of them join."],
    tuning: ["limits set by", "", "Why the tuner has set the limits of a step as they are: the configured bounds, the target for gaps (itl), the target for first tokens (ttft), or the memory. Targets may also be unreachable."],
    max_step_tokens: ["step limit", "tokens", "The most tokens that one step may compute, as the tuner has set the limit."],
    prefill_chunk: ["chunk limit", "tokens", "The most tokens of one prompt that one step may read, as the tuner has set the limit."],
    ttft_p99: ["first token p99", "", "99 of 100 requests had their first token within this time, over the last half minute."],
    itl_p99: ["gap p99", "", "99 of 100 gaps between two tokens of a request were shorter, over the last half minute."],
    last_dispatch: ["last dispatch", "", "Where the last request of this model went, and why: the dispatch policy, the replica, and the rule that chose the replica."],
    last_request: ["last request here", "", "Why this replica got its last request: the rule, and the replica's load. The load is the tokens of prompts and the expected tokens of outputs, with those of the new request, at the replica's speed beside the usual speed."],
  },
  "The picture of a replica": {
    slots: ["slots", "", "Each line is one slot of the replica's batch, and each colour is one request. Time runs to the right."],
    queue_strip: ["queue", "requests", "The requests that wait for a slot, over time."],
    kv_blocks: ["KV blocks", "blocks", "The blocks of KV memory, over time. Running requests own blocks (strong colour). Cached blocks (pale colour) hold prefixes that new requests may share. Free blocks hold nothing."],
    step_time: ["step time", "ms", "The milliseconds that one step of the batch takes: the mean (strong colour), and the longest of a fifth of a second (grey)."],
    step_tokens: ["step size", "tokens", "The tokens that one step computes, of the step's budget: output tokens (strong colour), and prompt tokens on top of them (pale colour)."],
  },
  "The queue of a replica": {
    queue: ["Queue", "", "The requests without a slot, in the order in which they would get a slot now."],
    tenant: ["tenant", "", "The tenant of the request: the name of its API key, or the field user of its body; or its id, without a tenant."],
    waits_for: ["waits for", "", "The reason why the request does not join the batch now. None overtakes the request before it."],
    expected: ["expected", "", "The time until the request gets a slot, as the replica expects it from its speed."],
  },
  "One request": {
    request_id: ["id", "", "The id of the request in logs and answers."],
    tenant_class: ["tenant, class", "", "The tenant of the request, and its class: a smaller number goes first under the policy priority; background requests use idle slots only."],
    prompt: ["prompt", "tokens", "The length of the prompt. Cached tokens were in the KV memory already, and are not computed again."],
    output: ["output", "tokens", "The tokens that were generated so far."],
    memory: ["memory", "blocks", "The blocks of KV memory that the request owns."],
    queue_time: ["queue", "", "The time from the arrival of the request at the replica until its first slot."],
    moved: ["then", "", "Why the request left its slot, and how long it waited for the next one."],
    stay: ["slot", "", "One stay in a slot of a replica: how long the prompt was read, and how long output was generated."],
    gaps: ["gaps between tokens", "", "The times between two tokens of the output, as a reader of the stream meets them."],
  },
  "Tables for administrators": {
    key: ["key", "", "The name of the API key, as in the file of keys."],
    model: ["model", "", "The name of the model in requests."],
    requests: ["requests", "", "The calls that have ended in this month."],
    prompt_tokens: ["prompt", "tokens", "All tokens of the prompts, the cached ones included."],
    cached_tokens: ["of them cached", "tokens", "The prompt tokens that were in the KV memory already."],
    output_tokens: ["output", "tokens", "All tokens that were generated."],
    cost: ["cost", "", "The cost by the prices of the model when the call ended, in the currency of these prices. Without prices the cost is 0."],
    replicas: ["replicas", "", "The replicas that the model has now."],
    wanted: ["wanted", "replicas", "The replicas that the model should have by the rule of autoscaling."],
    why: ["why", "", "The reason for the wanted number."],
  },
  "The playground": {
    answer_time: ["time", "", "The time from the click until the whole answer had come, in this browser."],
    first_token: ["first token after", "", "The time from the click until the first token had come, in this browser."],
    answer_tokens: ["output", "tokens", "The tokens of the answer, as the service has counted them."],
    answer_rate: ["rate", "tokens/s", "The tokens each second after the first token, in this browser."],
    prompt_size: ["prompt", "tokens", "The tokens of the prompt, with the template of the chat."],
    prompt_cached: ["cached", "tokens", "The prompt tokens that were in the KV memory already."],
    replica: ["replica", "", "The replica that has answered."],
    probability: ["probability", "", "The probability of each answer by the model, from 0 to 1. The probabilities of one question add up to 1."],
  },
  "Batches": {
    created: ["created", "", "When the batch was created, in the time of this browser; and how long the batch took, once the batch has ended."],
    batch_id: ["batch", "", "The id of the batch in the API, in logs and in webhooks."],
    batch_model: ["model", "", "The model that all requests of the batch name. Requests of one file may also name several models."],
    progress: ["progress", "", "The requests of the file that have ended, of all. Failed requests are in the file of errors."],
    batch_state: ["state", "", "The status of the batch in the API. A paused batch waits for its storage."],
    webhook: ["webhook", "", "The message about the end of the batch: waiting for the end, pending, delivered, or given up after a day."],
    actions: ["actions", "", "Results are the answers, one JSON object a line. Errors are the requests that have failed or have not run."],
  },
};

export const FIGURES = Object.assign({}, ...Object.values(GROUPS));

// The word for a figure. The explanation shows under the pointer and on focus, and screen readers read it.
// `label`: in place of that of the table.
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

// The head of a table's column or row.
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

// Shows [name, value, kind, more] one after the other. Elements stay while their values change, and so does the focus.
// `more` follows the explanation.
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

// Puts `shown` into the place where the elements there are others.
export function keepFocus(place, shown) {
  if (shown.length === place.children.length && shown.every((each, index) => each === place.children[index])) return;
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  place.replaceChildren(...shown);
  if (focused?.isConnected) focused.focus();
  rove(place);
}

// One press of Tab reaches one word of a group, and the arrow keys the others.
export function rove(place, chosen = null) {
  const words = wordsOf(place.closest("[data-figures]") ?? place);
  const one = chosen ?? words.find((each) => each.tabIndex === 0) ?? words[0];
  for (const each of words) each.tabIndex = each === one ? 0 : -1;
}

const wordsOf = (group) => [...group.querySelectorAll("abbr[data-figure]")];

// ---------------------------------------------------------------- explanations

const tip = element("div");
tip.id = "tip";
tip.setAttribute("aria-hidden", "true"); // screen readers have the description of the word
tip.hidden = true;
let told = null; // the word that is explained

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
  // The explanation of the word with the focus moves with the word: the focus itself may have scrolled the page.
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
