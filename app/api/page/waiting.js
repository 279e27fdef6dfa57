// Shows where a message's request is, if the page knows, until the request has its first token.

import { element, seconds, setText } from "/page/elements.js";
import { history } from "/page/live.js";

const EVERY_MS = 200;
const FRESH_MS = 2000; // an older state of the live view may be outdated

// Shows the state in `place` until `end()`. The ids of the engine requests contain `id`.
export function showWaiting(place, id, began) {
  const line = element("span", "pending");
  const [words, time] = [element("span"), element("span", "time")];
  time.setAttribute("aria-hidden", "true"); // screen readers would announce every second
  line.append(words, time);
  place.append(line);
  let usual = "waiting for the first token…";
  const show = () => {
    setText(words, seen(id) || usual);
    setText(time, ` ${seconds(performance.now() - began)}`);
  };
  const timer = setInterval(show, EVERY_MS);
  show();
  return {
    // If an answer starts before its first token, its headers contain the queue position.
    takeHeaders(headers) {
      const ahead = headers.get("x-carousel-queue-position");
      if (ahead) usual = `waiting for the first token: the queue${of(headers.get("x-carousel-replica"))} had ${requests(Number(ahead))} before this one…`;
    },
    end() {
      clearInterval(timer);
      line.remove();
    },
  };
}

const requests = (number) => `${number.toLocaleString("en")} request${number === 1 ? "" : "s"}`;
const of = (replica) => (replica ? ` of ${replica}` : "");

// Returns what the live view shows about the request, or "" if nothing. Only administrators have a live view.
function seen(id) {
  if (history.now() - history.at > FRESH_MS) return "";
  const { replica, stay, entry, ahead } = history.find(id) ?? {};
  if (entry) {
    const before = ahead ? `${requests(ahead)} before this one` : "the next one";
    return `waiting in the queue of ${replica.id}: ${before}${entry.expected_ms ? `, about ${seconds(entry.expected_ms)}` : ""}…`;
  }
  if (stay && stay.first === null) return `${replica.id} is reading the prompt, ${stay.use.num_prompt_tokens.toLocaleString("en")} tokens…`;
  if (stay) return `${replica.id} is writing…`;
  // A view lists only the first requests of a long queue.
  const waiting = history.replicas().reduce((sum, each) => sum + (each.view?.num_waiting ?? 0), 0);
  return waiting ? `waiting for a slot: ${requests(waiting)} in the queues…` : "";
}
