// Tables whose columns are figures. On a narrow screen, each row is a card that shows each value next to its label.

import { element } from "/page/elements.js";
import { column, FIGURES, rove } from "/page/figures.js";

// The roles repeat the meaning of the elements, because browsers do not treat the parts of a card as rows and cells.
const of = (tag, role) => {
  const made = element(tag);
  made.setAttribute("role", role);
  return made;
};

export function head(columns) {
  const row = of("tr", "row");
  row.append(...columns.map((name) => {
    const made = column(name);
    made.setAttribute("role", "columnheader");
    return made;
  }));
  row.dataset.figures = "";
  rove(row);
  return row;
}

// `cells` maps columns to texts or elements.
export function row(cells) {
  const made = of("tr", "row");
  for (const [name, content] of Object.entries(cells)) {
    const cell = of("td", "cell");
    const [label, unit] = FIGURES[name];
    cell.dataset.of = name;
    cell.dataset.label = unit ? `${label} ${unit}` : label;
    cell.append(content);
    made.append(cell);
  }
  return made;
}

// A line across all columns.
export function line(content, columns = 1) {
  const made = of("tr", "row");
  const cell = of("td", "cell");
  cell.colSpan = columns;
  cell.className = "across";
  cell.append(content);
  made.append(cell);
  return made;
}
