// Says where the request of a message is, as far as the page knows, until the request has its first token.

import { element, seconds, setText } from "/page/elements.js";
import { history } from "/page/live.js";

const EVERY_MS = 200;
const FRESH_MS = 2000; // what the live view has shown before may be over

// Shows the words in `place` until `end()`. The ids that engines give to the request contain `id`.
export function showWaiting(place, id, began) {
  const line = element("span", "pending");
  const [words, time] = [element("span"), element("span", "time")];
  time.setAttribute("aria-hidden", "true"); // screen readers would read each second
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
    // An answer that begins before its first token has the place in the queue in its headers.
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

// The live view's knowledge of the request; "" where there is none. Only administrators have a live view.
function seen(id) {
  if (history.now() - history.at > FRESH_MS) return "";
  const { replica, stay, entry, ahead } = history.find(id) ?? {};
  if (entry) {
    const before = ahead ? `${requests(ahead)} before this one` : "the next one";
    return `waiting in the queue of ${replica.id}: ${before}${entry.expected_ms ? `, about ${seconds(entry.expected_ms)}` : ""}…`;
  }
  if (stay && stay.first === null) return `${replica.id} is reading the prompt, ${stay.use.num_prompt_tokens.toLocaleString("en")} tokens…`;
  if (stay) return `${replica.id} is writing…`;
  // Of a long queue only the beginning is known.
  const waiting = history.replicas().reduce((sum, each) => sum + (each.view?.num_waiting ?? 0), 0);
  return waiting ? `waiting for a slot: ${requests(waiting)} in the queues…` : "";
}
