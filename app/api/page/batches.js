// The view "Batches": uploads a file of requests, starts a batch, shows its progress, and fetches results and errors.

import { call } from "/page/api.js";
import { element, seconds } from "/page/elements.js";
import { head, line, row } from "/page/table.js";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 1000;
const ENDED = ["completed", "failed", "cancelled", "expired"];
const COLUMNS = ["created", "batch_id", "batch_model", "progress", "batch_state", "webhook", "actions"];
const MAX_SHOWN_ERRORS = 20;
let timer = 0;
let shown = new Map(); // maps the id of a batch to its rows and to the text of the batch that they show

export async function show() {
  clearTimeout(timer);
  if ($("batches").hidden) return;
  let data = [];
  try {
    ({ data } = await (await call("/v1/batches?limit=20")).json());
    $("batches-notice").textContent = data.length ? "" : "There are no batches yet.";
  } catch (error) {
    $("batches-notice").textContent =
      error.status === 404 ? "This service has no batches: its configuration has no section `batches`." : error.message;
  }
  // Rows are reused while their batch is unchanged, so open lists and the focus stay.
  const known = shown;
  shown = new Map(data.map((batch) => {
    const text = JSON.stringify(batch);
    return [batch.id, known.get(batch.id)?.text === text ? known.get(batch.id) : { text, rows: rowsOf(batch) }];
  }));
  const parts = data.length ? [$("batch-list").firstChild ?? head(COLUMNS)] : [];
  for (const { rows } of shown.values()) parts.push(...rows);
  if (parts.length !== $("batch-list").childNodes.length || parts.some((part) => !part.isConnected)) {
    $("batch-list").replaceChildren(...parts);
  }
  timer = setTimeout(show, data.every((each) => ENDED.includes(each.status)) ? 5 * EVERY_MS : EVERY_MS);
}

function rowsOf(batch) {
  const main = row({
    created: times(batch), batch_id: element("span", "mono", batch.id),
    batch_model: batch.model ?? (batch.status === "validating" || batch.errors ? "–" : "several"),
    progress: progress(batch), batch_state: state(batch), webhook: webhook(batch.webhook), actions: actions(batch),
  });
  const errors = batch.errors?.data ?? [];
  return errors.length ? [main, line(errorList(errors), COLUMNS.length)] : [main];
}

function times(batch) {
  const made = element("span");
  const created = new Date(1000 * batch.created_at);
  const time = element("time", "", created.toLocaleString([], { dateStyle: "medium", timeStyle: "medium" }));
  time.dateTime = created.toISOString();
  made.append(time);
  const ended = batch.completed_at ?? batch.failed_at ?? batch.cancelled_at ?? batch.expired_at;
  if (ended) made.append(element("small", "", duration(ended - batch.created_at)));
  return made;
}

// The API reports whole seconds.
function duration(length) {
  if (length < 1) return "ended within 1 s";
  const [minutes, hours] = [Math.floor(length / 60), Math.floor(length / 3600)];
  const words = hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min ${length % 60} s` : seconds(1000 * length);
  return `ended after ${words}`;
}

function progress({ request_counts: { total, completed, failed }, status }) {
  const made = element("span", "progress");
  if (!total) return element("span", "", status === "validating" ? "checking the file" : "nothing has run");
  const bar = element("progress");
  bar.max = total;
  bar.value = completed + failed;
  bar.ariaLabel = "requests that have ended";
  made.append(bar, element("span", "", `${completed.toLocaleString("en")} of ${total.toLocaleString("en")} done`));
  if (failed) made.append(element("span", "why", `${failed.toLocaleString("en")} failed`));
  return made;
}

function state({ status, paused }) {
  const made = element("span");
  made.append(element("span", `state ${status}`, status.replace("_", " ")));
  if (paused) made.append(element("small", "paused", `paused: ${paused.message}`));
  return made;
}

// Shows the number of attempts only if there were several, and the error of a failed attempt.
function webhook(told) {
  if (!told) return "none";
  const words = { waiting: "waiting for the end", given_up: "given up" }[told.status] ?? told.status;
  const made = element("span");
  made.append(element("span", `webhook-${told.status}`, words));
  if (told.attempts > 1) made.append(element("small", "", `${told.attempts} attempts`));
  if (told.last_error) made.append(element("small", "why", told.last_error));
  return made;
}

function actions(batch) {
  const made = element("span", "actions");
  if (batch.output_file_id) made.append(button("Results", () => download(batch.output_file_id, `${batch.id}.jsonl`)));
  if (batch.error_file_id) made.append(button("Errors", () => download(batch.error_file_id, `${batch.id}-errors.jsonl`)));
  if (!ENDED.includes(batch.status) && batch.status !== "cancelling") {
    made.append(button("Cancel", () => doing(() => call(`/v1/batches/${batch.id}/cancel`, { body: {} }))));
  }
  return made;
}

// Returns the first error, followed by a list of the other errors.
function errorList([first, ...others]) {
  const made = element("div", "why");
  const told = ({ line: number, message }) => (number ? `line ${number.toLocaleString("en")}: ${message}` : message);
  made.append(element("span", "", told(first)));
  if (!others.length) return made;
  const listed = others.slice(0, MAX_SHOWN_ERRORS);
  const more = element("details");
  const list = element("ul");
  list.append(...listed.map((error) => element("li", "", told(error))));
  if (others.length > listed.length) {
    list.append(element("li", "", `and ${others.length - listed.length} more in the response of /v1/batches`));
  }
  more.append(element("summary", "", `and ${others.length} more error${others.length === 1 ? "" : "s"}`), list);
  made.append(more);
  return made;
}

async function upload(event) {
  event.preventDefault();
  const [file] = $("batch-file").files;
  if (!file) return;
  await doing(async () => {
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", file);
    const stored = await (await call("/v1/files", { form })).json();
    const first = (await file.slice(0, 65536).text()).split("\n")[0];
    const endpoint = urlOf(first);
    await call("/v1/batches", { body: { input_file_id: stored.id, endpoint, completion_window: "24h" } });
    $("batch-form").reset();
  });
}

// All lines of a file have the same url. The service reports mistakes in the file.
function urlOf(line) {
  try {
    return JSON.parse(line).url || "/v1/chat/completions";
  } catch {
    return "/v1/chat/completions";
  }
}

async function download(id, name) {
  await doing(async () => {
    const link = element("a");
    link.href = URL.createObjectURL(await (await call(`/v1/files/${id}/content`)).blob());
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

async function doing(what) {
  $("batch-error").textContent = "";
  try {
    await what();
  } catch (error) {
    $("batch-error").textContent = error.message;
  }
  await show();
}

function button(text, action) {
  const made = element("button", "", text);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

export function begin() {
  $("batch-form").addEventListener("submit", upload);
}
