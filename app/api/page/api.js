// Calls of the service with the key of this tab. The key is kept until the tab is closed, and nowhere else.

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

// `body` is sent as JSON, `form` as a form with files.
export async function call(path, { body, form, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined && form === undefined ? "GET" : "POST", headers, signal,
    body: body === undefined ? form : JSON.stringify(body),
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new ApiError(response.status, answer.error?.message || `HTTP ${response.status}`);
}

// The events of a response: {name, data} with data as text. EventSource cannot send a key.
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
