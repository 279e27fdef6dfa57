// The panel of one request: its timeline, its tokens over time, and a button that cancels it.

import { call } from "/page/api.js";
import { element, palette, seconds, setText } from "/page/elements.js";
import { column, keepFocus } from "/page/figures.js";
import { classOf } from "/page/history.js";

const $ = (id) => document.getElementById(id);
let shown = null; // the id of the request

// Only the rows are rebuilt while the panel is shown, because a button that is replaced loses its click and its focus.
export function showTimeline(history, id) {
  if (shown !== id) $("request-told").textContent = "";
  shown = id;
  const stays = id ? history.staysOf(id) : [];
  if (!stays.length) return;
  const last = stays[stays.length - 1];
  // Batch items run in the background. A batch can be cancelled only as a whole, in its own view.
  $("request-cancel").hidden = last.left !== null || last.use.is_background;
  const tokens = stays.map((stay) => history.tokenTimes(stay));
  showRows(rowsOf(history, id, stays, tokens));
  drawTokens($("request-tokens"), history, stays, tokens);
}

// Shows rows of [figure, value, label]. Rows are reused while only their values change, so the focus stays.
function showRows(rows) {
  const place = $("request-rows");
  const known = new Map([...place.children].map((each) => [each.dataset.of, each]));
  keepFocus(place, rows.map(([name, value, label], index) => {
    const of = `${index} ${name} ${label ?? ""}`;
    const made = known.get(of) ?? element("tr");
    made.dataset.of = of;
    if (!made.firstChild) made.append(column(name, label), element("td", name === "request_id" ? "mono" : ""));
    setText(made.lastChild, String(value));
    return made;
  }));
}

function rowsOf(history, id, stays, tokens) {
  const { use, left } = stays[stays.length - 1];
  const rows = [
    ["request_id", id], ["tenant_class", `${use.tenant || "–"}, ${classOf(use)}`],
    ["prompt", `${use.num_prompt_tokens}, ${use.num_cached_tokens} of them cached${fetched(use)}`],
    ["output", use.num_generated_tokens], ["memory", left === null ? use.num_blocks : "released"],
    ["queue_time", seconds(stays[0].joined - stays[0].arrived)],
  ];
  stays.forEach((stay, index) => {
    const first = stay.first ?? stay.left ?? history.at;
    const end = stay.left ?? history.at;
    if (index) rows.push(["moved", stay.isResumed ? "resumed on another replica" : `preempted, waited ${seconds(stay.joined - stays[index - 1].left)}`]);
    rows.push(["stay", `prompt ${seconds(first - stay.joined)}, output ${seconds(end - first)}${ended(stay)}`, `${stay.replica.id}, slot ${stay.slot + 1}`]);
  });
  const gaps = tokens.flatMap(gapsOf).sort((one, other) => one - other);
  if (gaps.length) {
    const of = (share) => seconds(gaps[Math.min(gaps.length - 1, Math.floor(gaps.length * share))]);
    rows.push(["gaps", `median ${of(0.5)}, 99 % below ${of(0.99)}, longest ${of(1)}`]);
  }
  return rows;
}

function fetched(use) {
  return use.num_fetched_tokens ? `, ${use.num_fetched_tokens} of these fetched from elsewhere in ${seconds(use.fetch_ms)}` : "";
}

async function cancel() {
  const id = shown;
  let told = "cancelled";
  try {
    await call(`/v1/requests/${encodeURIComponent(id)}/cancel`, { body: {} });
  } catch (error) {
    told = error.message;
  }
  if (shown === id) $("request-told").textContent = told;
}

export function begin() {
  $("request-cancel").addEventListener("click", cancel);
}

const gapsOf = (times) => times.slice(1).map((at, each) => at - times[each]);
const ended = (stay) => (stay.left === null ? ", running" : stay.why ? `, ended: ${stay.why}` : "");

// Draws the request's tokens over time, and below them the gap before each token.
function drawTokens(canvas, history, stays, tokens) {
  const colours = palette();
  const ratio = window.devicePixelRatio || 1;
  const [width, height, curve] = [canvas.clientWidth, 110, 60];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const begin = stays[0].arrived;
  const end = Math.max(stays[stays.length - 1].left ?? history.at, begin + 1);
  const most = Math.max(1, ...stays.map((stay) => stay.use.num_generated_tokens));
  const x = (at) => ((at - begin) / (end - begin)) * width;
  pen.fillStyle = colours.faint;
  pen.fillRect(0, 0, width, curve);
  pen.fillRect(0, curve + 4, width, height - curve - 4);
  pen.strokeStyle = colours.owned;
  pen.lineWidth = 2;
  pen.beginPath();
  pen.moveTo(0, curve - 2);
  stays.forEach((stay, index) => tokens[index].forEach((at, each) => {
    pen.lineTo(x(at), curve - 2 - ((stay.use.num_given_tokens + each + 1) / most) * (curve - 16));
  }));
  pen.stroke();
  const longest = tokens.flatMap(gapsOf).reduce((one, other) => Math.max(one, other), 1);
  pen.fillStyle = colours.owned;
  for (const times of tokens) {
    for (let each = 1; each < times.length; each += 1) {
      const tall = ((times[each] - times[each - 1]) / longest) * (height - curve - 18);
      const left = x(times[each - 1]);
      pen.fillRect(left, height - tall, Math.max(x(times[each]) - left - 0.5, 0.5), tall);
    }
  }
  pen.fillStyle = colours.soft;
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(`${most} tokens in ${seconds(end - begin)}`, 4, 12);
  pen.fillText(`gap before each token, at most ${seconds(longest)}`, 4, curve + 15);
}
