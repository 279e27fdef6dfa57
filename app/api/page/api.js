// Calls the service with this tab's key. The key is stored only in this tab, until the tab is closed.

const NAME = "carousel.key";

export const key = {
  get: () => sessionStorage.getItem(NAME) || "",
  set: (value) => (value ? sessionStorage.setItem(NAME, value) : sessionStorage.removeItem(NAME)),
};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The document receives the event "key-wanted" for each call that is refused because of its key, and "key-accepted" for
// all other calls.
const tell = (event) => document.dispatchEvent(new Event(event));

// Returns an error message for a person. The service's own messages about keys are for programs, which send a key in a
// header.
function explained(path, status, message) {
  const isForAdmins = path.startsWith("/admin/");
  const kind = isForAdmins ? "an administrator's API key" : "an API key";
  if (status === 401 && key.get()) return `The service does not know this API key. Enter ${kind} in the field at the top right.`;
  if (status === 401) return `Enter ${kind} in the field at the top right.`;
  if (status !== 403 || !isForAdmins) return message;
  if (key.get()) return `This is for administrators. Enter ${kind} in the field at the top right.`;
  return "This is for administrators. The service has no API keys and is open to other machines, so nobody is an administrator. Set up API keys.";
}

// Sends `body` as JSON, or `form` as a form with files.
export async function call(path, { body, form, signal, headers: more } = {}) {
  const headers = { ...more };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined && form === undefined ? "GET" : "POST", headers, signal,
    body: body === undefined ? form : JSON.stringify(body),
  });
  tell(response.status === 401 ? "key-wanted" : "key-accepted");
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new ApiError(response.status, explained(path, response.status, answer.error?.message || `HTTP ${response.status}`));
}

// Yields the events of a response as {name, data}, with data as text. EventSource cannot be used, because it cannot
// send a key.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        let name = "message";
        const data = [];
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield { name, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
