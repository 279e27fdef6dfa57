// "Send 40 demo requests": prompts and outputs of mixed lengths, from four tenants. A browser opens at most six
// connections to a service. The live view and a chat need one each, so four calls carry at least ten prompts each.

import { call, events } from "/page/api.js";

const WORDS = "the carousel turns and one horse after another joins the ride while the music plays in the square".split(" ");
const LENGTHS = [32, 96, 224, 448]; // maximum output tokens of each call

// Enough requests to show the effect of a strategy: if all of them had a slot, none would have to wait.
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
