// The tabs, the key, and the light and dark themes.

import { key } from "/page/api.js";
import * as batches from "/page/batches.js";
import { demoSize, sendDemo } from "/page/demo.js";
import { setText } from "/page/elements.js";
import * as figures from "/page/figures.js";
import * as live from "/page/live.js";
import * as playground from "/page/playground.js";
import * as request from "/page/request.js";
import * as tables from "/page/tables.js";

const $ = (id) => document.getElementById(id);
const TABS = ["live", "playground", "batches"];

function open(name) {
  for (const each of TABS) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  if (name === "batches") batches.show();
  // The first view has no fragment. With a fragment, the first press of Tab would skip the tabs and go to its target.
  const address = name === TABS[0] ? location.pathname : `#${name}`;
  if (location.hash !== new URL(address, location).hash) history.replaceState(null, "", address);
}

for (const name of TABS) $(`tab-${name}`).addEventListener("click", () => open(name));
document.querySelector("nav").addEventListener("keydown", (event) => {
  const now = TABS.findIndex((each) => $(`tab-${each}`).getAttribute("aria-selected") === "true");
  const place = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: -1 }[event.key];
  if (place === undefined) return;
  event.preventDefault();
  const next = TABS.at(place % TABS.length);
  open(next);
  $(`tab-${next}`).focus();
});

const wanted = localStorage.getItem("carousel.theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const setTheme = (isDark) => document.documentElement.classList.toggle("dark", isDark);
setTheme(wanted ? wanted === "dark" : system.matches);
system.addEventListener("change", () => { if (!localStorage.getItem("carousel.theme")) setTheme(system.matches); });
$("theme").addEventListener("click", () => {
  const isDark = !document.documentElement.classList.contains("dark");
  setTheme(isDark);
  localStorage.setItem("carousel.theme", isDark ? "dark" : "light");
});

$("key").value = key.get();
function takeKey() {
  if (key.get() === $("key").value.trim()) return;
  key.set($("key").value.trim());
  live.watch();
  batches.show();
  models();
}
$("key").addEventListener("change", takeKey);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  takeKey();
});

// The field is marked until a key is accepted. It gets the focus only if nothing else has it.
document.addEventListener("key-wanted", () => {
  const isFirst = $("key-wanted").hidden;
  setText($("key-wanted"), key.get()
    ? "The service does not know this API key. Enter another one in the field at the top right."
    : "Enter an API key in the field at the top right: an administrator's key for the live view, any key for the playground and batches.");
  mark(true);
  if (isFirst && document.activeElement === document.body) $("key").focus();
});
document.addEventListener("key-accepted", () => mark(false));

function mark(isWanted) {
  $("key-wanted").hidden = !isWanted;
  $("key").setAttribute("aria-invalid", String(isWanted));
}

async function models() {
  try {
    await playground.loadModels();
  } catch (error) {
    fail(error);
  }
}

function fail(error) {
  if (error.status === 401) return; // reported above all views
  $("notice").textContent = error.message;
  $("notice").hidden = false;
}

$("demo").addEventListener("click", async () => {
  $("demo").disabled = true;
  const model = $("model").value;
  await sendDemo(model, demoSize(live.numSlots(model)), fail);
  $("demo").disabled = false;
});

figures.begin();
const openAddress = () => open(TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : TABS[0]);
addEventListener("hashchange", openAddress);
openAddress();
playground.begin();
batches.begin();
models();
request.begin();
tables.begin();
live.begin();
