// The switch for a model's strategy and policy. It shows which are in force, and switches all replicas without a
// restart.

import { call } from "/page/api.js";
import { element } from "/page/elements.js";

let choices = null; // the service's {strategies, policies}

async function load() {
  choices ??= await (await call("/admin/scheduler")).json();
  return choices;
}

// Returns a form, whose `show(view)` displays the strategy and policy in force on a replica.
export function newSwitch(model) {
  const form = element("form", "switch");
  const [strategy, policy] = [choice(form, "strategy"), choice(form, "policy")];
  const button = element("button", "", "Switch");
  const told = element("span", "told");
  told.setAttribute("role", "status");
  form.append(button, told);
  form.hidden = true;
  let isTouched = false;
  load().then(({ strategies, policies }) => {
    strategy.append(...strategies.map((name) => new Option(name)));
    policy.append(...policies.map((name) => new Option(name)));
    form.hidden = false;
  }).catch(() => {}); // the live view shows why the call was refused
  form.addEventListener("input", () => { isTouched = true; told.textContent = ""; });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      const answer = await (await call("/admin/scheduler", { body: { model, strategy: strategy.value, policy: policy.value } })).json();
      const missing = answer.missing ? `, ${answer.missing} did not answer` : "";
      told.textContent = `in force on ${answer.replicas.length} replica${answer.replicas.length === 1 ? "" : "s"}${missing}`;
    } catch (error) {
      told.textContent = error.message;
    }
    isTouched = false;
    button.disabled = false;
  });
  form.show = (view) => {
    if (isTouched || button.disabled || form.contains(document.activeElement)) return;
    if (strategy.value !== view.strategy) strategy.value = view.strategy;
    if (policy.value !== view.policy) policy.value = view.policy;
  };
  return form;
}

function choice(form, name) {
  const label = element("label", "", `${name} `);
  const select = element("select");
  select.name = name;
  label.append(select);
  form.append(label);
  return select;
}
