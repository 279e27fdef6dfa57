// What each key has used of each model in this month, for admins: a table that is fetched when it is opened.

import { call } from "/page/api.js";
import { element } from "/page/elements.js";

const COLUMNS = {
  key: "key", model: "model", requests: "requests", prompt_tokens: "prompt tokens", cached_tokens: "of them cached",
  output_tokens: "output tokens", cost: "cost",
};

function row(kind, values) {
  const made = element("tr");
  made.append(...values.map((value) => element(kind, "", String(value))));
  return made;
}

async function show(table) {
  try {
    const { data } = await (await call("/admin/usage?group_by=key,model")).json();
    const rows = data.map((each) => row("td", Object.keys(COLUMNS).map((name) => each[name].toLocaleString("en"))));
    table.replaceChildren(row("th", Object.values(COLUMNS)), ...rows);
  } catch (error) {
    table.replaceChildren(row("td", [error.message]));
  }
}

export function begin() {
  const place = document.getElementById("usage");
  place.addEventListener("toggle", () => { if (place.open) show(place.querySelector("table")); });
}
