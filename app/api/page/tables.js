// Tables for admins, each fetched when it is opened: the usage of keys this month, and the replicas wanted for each
// model.

import { call } from "/page/api.js";
import { head, line, row } from "/page/table.js";

const TABLES = {
  usage: {
    path: "/admin/usage?group_by=key,model", list: "data", none: "no call has ended in this month",
    columns: ["key", "model", "requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost"],
  },
  wanted: {
    path: "/admin/fleet", list: "autoscaling", none: "no model has replicas.autoscaling",
    columns: ["model", "replicas", "wanted", "why"],
  },
};

async function show(place, { path, list, columns, none }) {
  try {
    const entries = (await (await call(path)).json())[list];
    const cells = (entry) => Object.fromEntries(columns.map((name) => [name, entry[name].toLocaleString("en")]));
    place.replaceChildren(...(entries.length ? [head(columns), ...entries.map((entry) => row(cells(entry)))] : [line(none)]));
  } catch (error) {
    place.replaceChildren(line(error.message));
  }
}

export function begin() {
  for (const [name, table] of Object.entries(TABLES)) {
    const place = document.getElementById(name);
    place.addEventListener("toggle", () => { if (place.open) show(place.querySelector("table"), table); });
  }
}
