// A new element with a class and a text.
export function element(tag, kind = "", text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}
