// Tables whose columns are figures. On a narrow screen each row is a card, with the label of each value beside it.

import { element } from "/page/elements.js";
import { column, FIGURES, rove } from "/page/figures.js";

// The roles say again what the elements are: a browser takes the parts of a card for no rows and cells.
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

// `cells` are texts or elements, by their columns.
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
