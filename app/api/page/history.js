// The last five minutes of the live view: the stays in slots of each replica, and samples of its state.

export const KEPT_MS = 5 * 60 * 1000 + 15 * 1000;
const SAME_MS = 400; // tolerance for the same stay in two views, because clocks and networks are not exact
const GONE_MS = 60 * 1000; // how long a removed replica is still shown

// A request that resumed on another replica has an id for its attempt there: its own id, a dot and a number.
export const baseId = (requestId) => requestId.replace(/\.[1-9]$/, "");

export class History {
  constructor() {
    this.models = new Map(); // name -> {name, decision, replicas: Map}
    this.names = new Map(); // maps requests, tenants and classes to a number in order of appearance, for colours
    this.at = 0; // time of the last event
    this.lag = Infinity; // this clock minus the service's clock, at the smallest delay so far
  }

  // ---------------------------------------------------------------- events

  take(event, fields) {
    this.at = event.at;
    this.lag = Math.min(this.lag, Date.now() - event.at);
    for (const [name, given] of Object.entries(event.models)) {
      const model = this.models.get(name) || { name, replicas: new Map() };
      this.models.set(name, model);
      model.decision = given.decision;
      this.#takeReplicas(model, given.replicas, event.at);
      for (const [id, at, values] of given.views) this.#takeView(this.#replica(model, id), at, named(values, fields));
    }
    this.#forget(event.at - KEPT_MS);
  }

  #replica(model, id) {
    if (!model.replicas.has(id)) {
      model.replicas.set(id, {
        id, model: model.name, state: "serving", facts: {}, open: new Map(), stays: [], samples: [], view: null, goneAt: 0,
      });
    }
    return model.replicas.get(id);
  }

  #takeReplicas(model, described, at) {
    const known = new Set();
    for (const facts of described) {
      known.add(facts.replica);
      const replica = this.#replica(model, facts.replica);
      replica.facts = facts;
      if (replica.state !== facts.state) replica.samples.push({ at, state: facts.state });
      replica.state = facts.state;
      replica.goneAt = 0;
      if (facts.state === "lost") this.#closeAll(replica, at, "lost");
    }
    for (const replica of model.replicas.values()) {
      if (known.has(replica.id) || replica.goneAt) continue;
      replica.state = "gone";
      replica.goneAt = at;
      this.#closeAll(replica, at, "lost");
    }
  }

  #takeView(replica, at, view) {
    replica.view = view;
    replica.viewAt = at;
    replica.samples.push({
      at, running: view.num_running, waiting: view.num_waiting, reason: view.wait_reason, rule: `${view.strategy}, ${view.policy}`, slots: view.max_running, budget: view.max_step_tokens,
      blocks: view.num_blocks, cached: view.num_cached_blocks, free: view.num_free_blocks, ...view.steps,
    });
    const seen = new Set();
    for (const use of view.slots) {
      const stay = this.#stay(replica, at, use);
      seen.add(stay);
      if (use.left_ms !== null) this.#close(replica, stay, at - use.left_ms, use.why_left);
    }
    for (const stay of this.#report(replica, at, view.reported ?? [])) seen.add(stay);
    for (const stay of [...replica.open.values()]) if (!seen.has(stay)) this.#close(replica, stay, at, "");
  }

  #stay(replica, at, use) {
    const joined = at - use.joined_ms;
    let stay = replica.open.get(use.request_id);
    if (!stay || stay.slot !== use.slot || Math.abs(stay.joined - joined) > SAME_MS) {
      if (stay) this.#close(replica, stay, joined, "");
      stay = { replica, joined, arrived: at - use.arrived_ms, slot: use.slot, first: null, left: null, why: "", counts: [] };
      replica.open.set(use.request_id, stay);
      replica.stays.push(stay);
    }
    stay.use = use;
    stay.id = baseId(use.request_id);
    stay.isResumed = use.num_given_tokens > 0 || (stay.id !== use.request_id && this.#isKnown(stay.id, stay));
    if (use.first_token_ms !== null && stay.first === null) stay.first = at - use.first_token_ms;
    this.#count(stay, at);
    return stay;
  }

  // `reported` is a flat list of slot, tokens, blocks. An unknown stay is added by the next full view.
  #report(replica, at, reported) {
    const found = [];
    const inSlots = new Map([...replica.open.values()].map((stay) => [stay.slot, stay]));
    for (let each = 0; each < reported.length; each += 3) {
      const stay = inSlots.get(reported[each]);
      if (!stay) continue;
      stay.use.num_generated_tokens = reported[each + 1];
      stay.use.num_blocks = reported[each + 2];
      this.#count(stay, at);
      found.push(stay);
    }
    return found;
  }

  // Appends the time and the tokens so far to one flat list, which uses a tenth of the memory of a list of pairs.
  #count(stay, at) {
    if (stay.counts.at(-1) !== stay.use.num_generated_tokens) stay.counts.push(at, stay.use.num_generated_tokens);
  }

  #isKnown(id, but) {
    return this.staysOf(id).some((stay) => stay !== but);
  }

  #closeAll(replica, at, why) {
    for (const stay of [...replica.open.values()]) this.#close(replica, stay, at, why);
  }

  #close(replica, stay, at, why) {
    stay.left = Math.max(at, stay.joined);
    stay.why = why;
    if (replica.open.get(stay.use.request_id) === stay) replica.open.delete(stay.use.request_id);
  }

  #forget(before) {
    for (const model of this.models.values()) {
      for (const replica of model.replicas.values()) {
        const old = replica.stays.findIndex((stay) => stay.left === null || stay.left > before);
        if (old > 200) replica.stays.splice(0, old);
        while (replica.samples.length && replica.samples[0].at < before) replica.samples.shift();
        if (replica.goneAt && this.at - replica.goneAt > GONE_MS) model.replicas.delete(replica.id);
      }
    }
    if (this.names.size > 20000) this.names.clear();
  }

  // ---------------------------------------------------------------- questions

  replicas() {
    return [...this.models.values()].flatMap((model) => [...model.replicas.values()]);
  }

  staysOf(id) {
    return this.replicas().flatMap((replica) => replica.stays.filter((stay) => stay.id === id))
      .sort((one, other) => one.joined - other.joined);
  }

  // Finds the request whose id contains `part` in the last views: returns {replica, stay} if it is in a slot, {replica,
  // entry, ahead} if it is in a queue, and null otherwise. A view lists only the first requests of a long queue.
  find(part) {
    for (const replica of this.replicas()) {
      for (const stay of replica.open.values()) if (stay.use.request_id.includes(part)) return { replica, stay };
      const waiting = replica.view?.waiting ?? [];
      const ahead = waiting.findIndex((entry) => entry.request_id.includes(part));
      if (ahead >= 0) return { replica, entry: waiting[ahead], ahead };
    }
    return null;
  }

  // Returns the time of each token of a stay: the reported ends of steps, and evenly spaced times in between. The steps
  // of a late view are late as well, so none is placed before the steps of the previous view.
  tokenTimes(stay) {
    const times = [];
    const { samples } = stay.replica;
    let index = 0;
    let before = stay.use.num_given_tokens;
    let last = stay.first ?? stay.joined;
    for (let each = 0; each < stay.counts.length; each += 2) {
      const [at, tokens] = [stay.counts[each], stay.counts[each + 1]];
      const number = tokens - before;
      if (number <= 0) continue;
      while (index < samples.length && samples[index].at < at) index += 1;
      const steps = (samples[index]?.at === at && samples[index].ended_ms) || [];
      const ends = steps.map((ms) => Math.max(at - ms, last)).filter((end) => end <= (stay.left ?? at) + 1).slice(-number);
      const until = Math.max(ends[0] ?? stay.left ?? at, last);
      for (let more = 1; more <= number - ends.length; more += 1) times.push(last + ((until - last) * more) / (number - ends.length + 1));
      times.push(...ends);
      before = tokens;
      last = times.at(-1);
    }
    return times;
  }

  // Returns the current time on the service's clock.
  now() {
    return Number.isFinite(this.lag) ? Date.now() - this.lag : this.at;
  }

  hue(kind, use) {
    const name = kind === "tenant" ? `t:${use.tenant}` : kind === "class" ? classOf(use) : `r:${baseId(use.request_id)}`;
    if (!this.names.has(name)) this.names.set(name, this.names.size);
    return (205 + this.names.get(name) * 137.508) % 360; // the golden angle: neighbours differ
  }
}

export const classOf = (use) => (use.is_background ? "background" : `priority ${use.priority}`);

// Converts lists to objects. The first event of a stream lists their field names.
function named(values, fields) {
  const view = asObject(values, fields.view);
  view.steps = asObject(view.steps, fields.steps);
  view.tuning &&= asObject(view.tuning, fields.tuning);
  view.slots = view.slots.map((each) => asObject(each, fields.slots));
  view.waiting = view.waiting.map((each) => asObject(each, fields.waiting));
  return view;
}

function asObject(values, names) {
  const object = {};
  names.forEach((name, index) => { object[name] = values[index]; });
  return object;
}
