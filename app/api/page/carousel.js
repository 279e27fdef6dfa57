// Draws one replica: its slots over time, and below them its queue, its KV blocks and its steps.

const LABEL = 66; // pixels on the left for the words next to the canvas
const STRIPS = [["waiting", 26], ["blocks", 30], ["time", 26], ["tokens", 26]]; // with their heights
const GAP = 8;

function rowsOf(replica) {
  const slots = replica.view?.max_running || replica.facts.max_running || 8;
  const rows = Math.min(slots, 256);
  return { rows, rowHeight: Math.max(2, Math.min(14, Math.floor(260 / rows))) };
}

function heightOf(replica) {
  const { rows, rowHeight } = rowsOf(replica);
  return rows * rowHeight + STRIPS.reduce((sum, [, height]) => sum + height + GAP, 0) + 18;
}

// Sets the height of the canvas, and the position of the words next to it. The first word belongs to the slots, and the
// others to the strips.
export function layOut(canvas, labels, replica) {
  const { rows, rowHeight } = rowsOf(replica);
  canvas.style.height = `${heightOf(replica)}px`;
  let top = rows * rowHeight + GAP;
  labels.firstChild.style.top = "0px";
  STRIPS.forEach(([, height], index) => {
    labels.children[index + 1].style.top = `${top + height / 2 - 9}px`;
    top += height + GAP;
  });
}

export function draw(canvas, replica, { history, from, to, kind, selected, colours }) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = heightOf(replica);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  const x = (at) => LABEL + ((at - from) / (to - from)) * (width - LABEL);
  const { rows, rowHeight } = rowsOf(replica);
  drawSlots(pen, replica, { history, from, to, kind, selected, colours, x, width, rows, rowHeight });
  const samples = replica.samples.filter((each) => each.at >= from - 1000 && each.at <= to + 400 && each.blocks !== undefined);
  drawSwitches(pen, samples, { x, height: rows * rowHeight, width, colours });
  let top = rows * rowHeight + GAP;
  for (const [name, tall] of STRIPS) {
    drawStrip(pen, name, samples, { x, top, tall, width, colours });
    top += tall + GAP;
  }
  drawTime(pen, { from, to, x, top: top + 4, width, colours, now: history.now() });
}

// ---------------------------------------------------------------- slots

function drawSlots(pen, replica, { history, from, to, kind, selected, colours, x, width, rows, rowHeight }) {
  const bar = rowHeight > 4 ? rowHeight - 2 : rowHeight - (rowHeight > 2 ? 1 : 0);
  pen.fillStyle = colours.faint;
  for (let row = 0; row < rows; row += 1) pen.fillRect(LABEL, row * rowHeight, width - LABEL, bar);
  const until = replica.goneAt || Math.min(to, replica.viewAt || to);
  for (const stay of replica.stays) {
    const end = stay.left ?? until;
    if (end < from || stay.joined > to || stay.slot >= rows) continue;
    drawStay(pen, stay, { end: Math.min(end, to), top: stay.slot * rowHeight, bar, from, history, kind, selected, colours, x });
  }
  pen.fillStyle = colours.soft;
  pen.textBaseline = "middle";
  if (rows * rowHeight > 30) pen.fillText(`1–${rows}`, 0, 25);
}

function drawStay(pen, stay, { end, top, bar, from, history, kind, selected, colours, x }) {
  const hue = history.hue(kind, stay.use);
  const isDim = selected && stay.id !== selected;
  const start = Math.max(stay.joined, from);
  const first = Math.min(Math.max(stay.first ?? end, start), end);
  const [thin, tall] = stay.use.is_background ? [top + bar * 0.3, Math.max(1, bar * 0.4)] : [top, bar];
  pen.globalAlpha = isDim ? 0.25 : 1;
  const left = x(start);
  const middle = x(first);
  const right = Math.max(x(end), left + 1);
  if (stay.use.fetch_ms && stay.joined >= from) {  // its prefix was read meanwhile
    const fetched = Math.max(Math.min(x(stay.joined - stay.use.fetch_ms), left - 2), LABEL);
    pen.fillStyle = colours.warn;
    pen.fillRect(fetched, thin + tall / 2 - 1, left - fetched, 2);
  }
  pen.fillStyle = `hsl(${hue} ${colours.isDark ? "30% 36%" : "50% 84%"})`;
  pen.fillRect(left, thin, Math.max(middle - left, 0), tall);
  pen.fillStyle = `hsl(${hue} ${colours.isDark ? "42% 62%" : "48% 58%"})`;
  for (let at = left; at < middle; at += 4) pen.fillRect(at, thin, Math.min(2, middle - at), tall);
  pen.fillRect(middle, thin, Math.max(right - middle - (stay.left === null ? 0 : 0.5), 0.5), tall);
  if (stay.isResumed && stay.joined >= from) {
    pen.fillStyle = colours.text;
    pen.fillRect(left, top, 3, bar);
  }
  if (stay.why === "preempted" || stay.why === "error" || stay.why === "lost") {
    pen.fillStyle = colours.bad;
    pen.fillRect(right - 3, top, 3, bar);
  }
  pen.globalAlpha = 1;
}

// Draws a line at each switch to another strategy or policy.
function drawSwitches(pen, samples, { x, height, width, colours }) {
  for (let each = 1; each < samples.length; each += 1) {
    if (samples[each].rule === samples[each - 1].rule) continue;
    const left = Math.max(LABEL, x(samples[each].at));
    const words = pen.measureText(samples[each].rule).width + 8;
    const start = left + words > width ? left - words : left;
    pen.fillStyle = colours.text;
    pen.fillRect(left, 0, 2, height);
    pen.fillRect(start, 0, words, 16);
    pen.fillStyle = colours.panel;
    pen.textBaseline = "middle";
    pen.fillText(samples[each].rule, start + 4, 8);
  }
}

// ---------------------------------------------------------------- strips

function drawStrip(pen, name, samples, { x, top, tall, width, colours }) {
  pen.fillStyle = colours.faint;
  pen.fillRect(LABEL, top, width - LABEL, tall);
  pen.fillStyle = colours.soft;
  pen.textBaseline = "middle";
  const area = (value, colour, max) => fill(pen, samples, value, { x, top, tall, colour, max });
  const note = (text) => {
    pen.textAlign = "right";
    pen.globalAlpha = 0.75;
    pen.fillStyle = colours.panel;
    pen.fillRect(width - 6 - pen.measureText(text).width, top, pen.measureText(text).width + 6, 14);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.soft;
    pen.fillText(text, width - 4, top + 7);
    pen.textAlign = "left";
  };
  if (!samples.length) return;
  const last = samples[samples.length - 1];
  if (name === "waiting") {
    const most = Math.max(4, ...samples.map((each) => each.waiting));
    area((each) => each.waiting, colours.warn, most);
    note(`${last.waiting} ${last.waiting === 1 ? "request" : "requests"}`);
  } else if (name === "blocks") {
    if (!last.blocks) return note("an encoder needs none");
    const most = last.blocks;
    area((each) => each.blocks - each.free, colours.cached, most);
    area((each) => each.blocks - each.free - each.cached, colours.owned, most);
    const owned = last.blocks - last.free - last.cached;
    note(`${owned} owned, ${last.cached} cached, ${last.free} free blocks`);
  } else if (name === "time") {
    const busy = samples.filter((each) => each.num_steps);
    const most = Math.max(1, ...busy.map((each) => each.longest_ms));
    area((each) => each.longest_ms, colours.line, most);
    area((each) => (each.num_steps ? each.busy_ms / each.num_steps : 0), colours.owned, most);
    note(last.num_steps ? `${(last.busy_ms / last.num_steps).toFixed(1)} ms, longest ${last.longest_ms.toFixed(1)} ms` : "idle");
  } else {
    area((each) => (each.num_steps ? each.num_tokens / each.num_steps : 0), colours.cached, last.budget);
    area((each) => (each.num_steps ? each.num_drawn_tokens / each.num_steps : 0), colours.owned, last.budget);
    const mean = last.num_steps ? Math.round(last.num_tokens / last.num_steps) : 0;
    note(`${mean} of ${last.budget} tokens a step`);
  }
}

function fill(pen, samples, value, { x, top, tall, colour, max }) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.moveTo(x(samples[0].at), top + tall);
  let before = 0;
  for (const each of samples) {
    const y = top + tall - (Math.min(value(each), max) / max) * tall;
    pen.lineTo(x(each.at), before || y);
    pen.lineTo(x(each.at), y);
    before = y;
  }
  pen.lineTo(x(samples[samples.length - 1].at), top + tall);
  pen.fill();
}

function drawTime(pen, { from, to, x, top, width, colours, now }) {
  const span = (to - from) / 1000;
  const every = span <= 20 ? 2 : span <= 40 ? 5 : span <= 90 ? 10 : 60;
  pen.fillStyle = colours.soft;
  pen.textBaseline = "top";
  pen.textAlign = "center";
  for (let back = 0; back < 600; back += every) {
    const at = now - back * 1000;
    if (at > to || at < from) continue;
    const place = x(at);
    if (place < LABEL + 12 || place > width - 14) continue;
    pen.fillText(`−${back} s`, place, top - 6);
  }
  pen.textAlign = "left";
}

// ---------------------------------------------------------------- pointing

// Returns the stay at a position on the canvas, or null.
export function stayAt(canvas, replica, { offsetX, offsetY }, { from, to }) {
  const { rows, rowHeight } = rowsOf(replica);
  const slot = Math.floor(offsetY / rowHeight);
  if (slot >= rows) return null;
  const at = from + ((offsetX - LABEL) / (canvas.clientWidth - LABEL)) * (to - from);
  const slack = ((to - from) / canvas.clientWidth) * 3;
  return replica.stays.findLast(
    (stay) => stay.slot === slot && stay.joined - slack <= at && (stay.left ?? Infinity) + slack >= at,
  ) || null;
}
