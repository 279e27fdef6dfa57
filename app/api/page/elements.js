// Returns a new element with a class and a text.
export function element(tag, kind = "", text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}

export function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// Formats milliseconds with a unit.
export const seconds = (ms) => (ms < 950 ? `${Math.max(0, Math.round(ms))} ms` : `${(ms / 1000).toFixed(1)} s`);

// Returns the colours of page.css for canvases.
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["faint", "panel", "soft", "text", "line", "bad", "warn", "owned", "cached"];
  const colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  return { ...colours, isDark: document.documentElement.classList.contains("dark") };
}
