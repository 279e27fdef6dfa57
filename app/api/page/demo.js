// "Send 40 demo requests": prompts and outputs of mixed lengths, of four tenants. A browser opens six connections to a
// service: the live view and a chat need one each, so that four calls carry ten prompts each, or more.

import { call, events } from "/page/api.js";

const WORDS = "the carousel turns and one horse after another joins the ride while the music plays in the square".split(" ");
const LENGTHS = [32, 96, 224, 448]; // tokens of output, at most, of each call

// How many requests show what a strategy does: where all of them have a slot at once, none has to wait for one.
export const demoSize = (numSlots) => LENGTHS.length * Math.min(100, Math.max(10, Math.ceil((2.5 * numSlots) / LENGTHS.length)));

export async function sendDemo(model, number, onError) {
  const calls = LENGTHS.map((maxTokens, index) => one(model, number / LENGTHS.length, maxTokens, `tenant ${index + 1}`, index));
  for (const result of await Promise.allSettled(calls)) if (result.status === "rejected") onError(result.reason);
}

async function one(model, number, maxTokens, user, index) {
  const prompts = Array.from({ length: number }, (_, each) => text(10 + ((each * 7 + index * 13) % 12) * 12));
  const body = { model, prompt: prompts, max_tokens: maxTokens, temperature: 1, ignore_eos: true, user, stream: true };
  const response = await call("/v1/completions", { body });
  for await (const event of events(response)) void event;
}

function text(numWords) {
  const words = [];
  for (let each = 0; each < numWords; each += 1) words.push(WORDS[Math.floor(Math.random() * WORDS.length)]);
  return words.join(" ");
}
