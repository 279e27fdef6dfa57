// The view "Batches": uploads a file of requests, begins a batch, shows progress, and fetches results and errors.

import { call } from "/page/api.js";
import { element } from "/page/elements.js";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 1000;
const ENDED = ["completed", "failed", "cancelled", "expired"];
let timer = 0;

export async function show() {
  clearTimeout(timer);
  if ($("batches").hidden) return;
  let data = [];
  try {
    ({ data } = await (await call("/v1/batches?limit=20")).json());
    $("batches-notice").textContent = data.length ? "" : "There are no batches yet.";
  } catch (error) {
    $("batches-notice").textContent =
      error.status === 404 ? "This service has no batches: its configuration has no branch `batches`." : error.message;
  }
  $("batch-list").replaceChildren(...data.map(row));
  timer = setTimeout(show, data.every((each) => ENDED.includes(each.status)) ? 5 * EVERY_MS : EVERY_MS);
}

function row(batch) {
  const { total, completed, failed } = batch.request_counts;
  const line = element("li");
  const bar = element("progress");
  bar.max = Math.max(total, 1);
  bar.value = completed + failed;
  const counts = `${completed} of ${total} done${failed ? `, ${failed} failed` : ""}`;
  line.append(element("span", "mono", batch.id), element("span", `state ${batch.status}`, batch.status), bar, element("span", "n", counts));
  const actions = element("span", "actions");
  if (batch.output_file_id) actions.append(button("Results", () => download(batch.output_file_id, `${batch.id}.jsonl`)));
  if (batch.error_file_id) actions.append(button("Errors", () => download(batch.error_file_id, `${batch.id}-errors.jsonl`)));
  if (!ENDED.includes(batch.status) && batch.status !== "cancelling") {
    actions.append(button("Cancel", () => doing(() => call(`/v1/batches/${batch.id}/cancel`, { body: {} }))));
  }
  const first = batch.errors?.data?.[0];
  line.append(actions);
  if (first) line.append(element("span", "why", first.message));
  return line;
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

// All lines of a file have the same url; what is wrong with the file the service says.
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
