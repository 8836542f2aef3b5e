/** Horizontal stacked bars: memory of devices against their capacity, where time went. */

import { colourName, el } from "./dom.js";
import { formatValue } from "./numbers.js";

/** The figure of a `bars` block. */
export function barsFigure({ title, note, format, rows }) {
  const largest = Math.max(1e-300, ...rows.map(rowEnd));
  const legend = new Map(rows.flatMap(({ parts }) => parts).map((part) => [part.label, part]));
  const showLegend = legend.size > 1;
  return el("figure", { class: "bars" },
    el("figcaption", {}, el("span", {}, el("strong", { class: "chart-title" }, title), " ",
      note && el("span", { class: "quiet" }, note))),
    el("dl", {}, rows.map((row) => barRow(row, format, largest))),
    showLegend && el("ul", { class: "legend" }, [...legend.values()].map(({ label, colour }) => {
      return el("li", {}, el("span", { class: "swatch block", style: barColour(colour) }), label);
    })));
}

function barRow({ label, parts, limit, marks = [] }, format, largest) {
  const total = sumOf(parts);
  const position = (value) => `${(100 * value) / largest}%`;
  const over = limit !== undefined && limit !== null && total > limit;
  const known = limit !== undefined && limit !== null;
  const text = known
    ? `${formatValue(total, format)} of ${formatValue(limit, format)}`
    : formatValue(total, format);
  return [
    el("dt", {}, label),
    el("dd", {},
      el("div", { class: "bar-track" },
        known && el("div", { class: "bar-room", style: { width: position(limit) } }),
        el("div", { class: "bar-parts" }, parts.filter(({ value }) => value > 0).map((part) => {
          return el("div", { class: "bar-part", title: partText(part, format),
            style: { width: position(part.value), ...barColour(part.colour) } });
        })),
        known && el("div", { class: "bar-limit", title: `limit ${formatValue(limit, format)}`,
          style: { left: position(limit) } }),
        marks.map((mark) => el("div", { class: "bar-mark", title: partText(mark, format),
          style: { left: position(mark.value) } }))),
      el("span", { class: over ? "bar-total bad" : "bar-total" }, text),
      el("span", { class: "unseen" }, [...parts, ...marks].map((part) => {
        return partText(part, format);
      }).join(", "))),
  ];
}

function rowEnd({ parts, limit, marks = [] }) {
  return Math.max(sumOf(parts), limit ?? 0, ...marks.map(({ value }) => value));
}

function sumOf(parts) {
  return parts.reduce((sum, { value }) => sum + value, 0);
}

function partText({ label, value }, format) {
  return `${label}: ${formatValue(value, format)}`;
}

function barColour(colour) {
  return { "--colour": `var(--${colourName(colour)})` };
}
