// Tables for admins, each fetched when it is opened: what keys have used in this month, how many replicas models want.

import { call } from "/page/api.js";
import { element } from "/page/elements.js";

const TABLES = {
  usage: {
    path: "/admin/usage?group_by=key,model", list: "data",
    columns: {
      key: "key", model: "model", requests: "requests", prompt_tokens: "prompt tokens", cached_tokens: "of them cached",
      output_tokens: "output tokens", cost: "cost",
    },
  },
  wanted: {
    path: "/admin/fleet", list: "autoscaling", none: "no model has replicas.autoscaling",
    columns: { model: "model", replicas: "replicas", wanted: "wanted", why: "why" },
  },
};

function row(kind, values) {
  const made = element("tr");
  made.append(...values.map((value) => element(kind, "", String(value))));
  return made;
}

async function show(place, { path, list, columns, none }) {
  try {
    const entries = (await (await call(path)).json())[list];
    const rows = entries.map((each) => row("td", Object.keys(columns).map((name) => each[name].toLocaleString("en"))));
    place.replaceChildren(...(none && !rows.length ? [row("td", [none])] : [row("th", Object.values(columns)), ...rows]));
  } catch (error) {
    place.replaceChildren(row("td", [error.message]));
  }
}

export function begin() {
  for (const [name, table] of Object.entries(TABLES)) {
    const place = document.getElementById(name);
    place.addEventListener("toggle", () => { if (place.open) show(place.querySelector("table"), table); });
  }
}
