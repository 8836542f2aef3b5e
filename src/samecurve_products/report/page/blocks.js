/** Blocks of a page as elements: one function for each type of block. */

import { barsFigure } from "./bars.js";
import { Chart, ChartView } from "./charts.js";
import { el, withCode } from "./dom.js";
import { formatDigits } from "./numbers.js";
import { ChartTools } from "./tools.js";

const drawn = {
  header, heading, text, cards, table, pre, spans, details, pictures, bars: barsFigure,
};
// pixels across a picture that may be shown smaller than it is: its letters have to stay whole
const LARGE = 128;
const toneSigns = { bad: "✕", warn: "!", good: "✓" };

/**
 * What blocks need to be drawn: the runs, the charts' view, and the charts by name.
 *
 * Kept from one rendering to the next, it keeps the charts too: a chart that is drawn again moves.
 */
export class PageContext {
  /** runs: a list of RunColumns; it may be filled later. */
  constructor(runs) {
    this.runs = runs;
    this.view = new ChartView();
    this.charts = new Map();
    this.tools = new Map();
  }

  /** Draw again what the runs hold now. */
  update() {
    this.tools.forEach((tools) => tools.refresh());
    this.charts.forEach((chart) => chart.update());
  }

  /** The chart of a block; the one that has its name already, if there is one. */
  chart(block) {
    const known = this.charts.get(block.name);
    if (known) known.setBlock(block);
    else this.charts.set(block.name, new Chart(block, this.runs, this.view));
    return this.charts.get(block.name).element;
  }

  /** The controls of charts that begin with one of this name. */
  toolsOf(name) {
    if (!this.tools.has(name)) this.tools.set(name, new ChartTools(this.view, this.runs));
    const tools = this.tools.get(name);
    tools.refresh();
    return tools.element;
  }

  /** Remove the charts that are not among `blocks`. */
  keepOnly(blocks) {
    const names = new Set(chartNames(blocks));
    for (const [name, chart] of this.charts) {
      if (names.has(name)) continue;
      chart.destroy();
      this.charts.delete(name);
    }
  }

  destroy() {
    this.keepOnly([]);
  }
}

/** The blocks as one fragment. Charts that follow each other share a grid. */
export function renderBlocks(blocks, context) {
  const fragment = document.createDocumentFragment();
  let grid = null;
  blocks.forEach((block, index) => {
    if (block.type !== "chart") {
      grid = null;
      fragment.append(drawn[block.type](block, context));
      return;
    }
    if (grid === null) {
      const first = blocks.findIndex(({ type }) => type === "chart") === index;
      if (first && sharesAxis(blocks)) {
        fragment.append(context.toolsOf(block.name));
      }
      grid = el("div", { class: "charts" });
      fragment.append(grid);
    }
    grid.append(context.chart(block));
  });
  return fragment;
}

/** Names of the charts among blocks, and among the blocks within them. */
function chartNames(blocks) {
  return blocks.flatMap((block) => {
    return block.type === "chart" ? [block.name] : chartNames(block.blocks ?? []);
  });
}

function sharesAxis(blocks) {
  return blocks.some(({ type, x }) => type === "chart" && x?.kind !== "own");
}

function header({ title, badge: state, quiet }) {
  return el("header", { class: "page-header" }, el("h1", {}, title), state && badge(state),
    quiet && el("span", { class: "quiet" }, quiet));
}

/** A coloured word: {text, tone: good | bad | warn | accent | quiet}. */
export function badge({ text: words, tone }) {
  return el("span", { class: `badge ${tone ?? "quiet"}` }, words);
}

function heading({ text: words, level }) {
  return el(level === 3 ? "h3" : "h2", {}, words);
}

function text({ text: words, tone, title }) {
  if (!tone || tone === "quiet") {
    return el("p", { class: tone }, title && el("strong", {}, `${title} `), withCode(words));
  }
  return el("div", { class: `note ${tone}`, role: tone === "bad" ? "alert" : null },
    el("span", { class: "note-sign", "aria-hidden": "true" }, toneSigns[tone]),
    el("div", {}, title && el("strong", {}, withCode(title)), el("p", {}, withCode(words))));
}

function cards({ items }) {
  return el("dl", { class: "cards" }, items.map(({ title, value, note }) => el("div", {},
    el("dt", {}, title), el("dd", {}, value), note && el("dd", { class: "quiet" }, note))));
}

function table({ head, rows, numbers }) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" },
    el("table", { class: numbers ? "numbers" : null },
      head.some((cell) => cellText(cell)) && el("thead", {}, el("tr", {},
        head.map((cell) => el("th", { scope: "col" }, cellContent(cell))))),
      el("tbody", {}, rows.map(([first, ...rest]) => el("tr", {},
        el("th", { scope: "row" }, cellContent(first)),
        rest.map((cell) => el("td", { class: cell?.tone }, cellContent(cell))))))));
}

function cellText(cell) {
  if (typeof cell === "number") return formatDigits(cell);
  return typeof cell === "object" ? (cell?.text ?? "") : cell;
}

function cellContent(cell) {
  const words = cellText(cell);
  if (typeof cell !== "object" || cell === null) return words;
  const { note, share } = cell;
  const shaded = share === undefined
    ? words : el("span", { class: "share", style: { "--share": share } }, words);
  return [shaded, note && el("div", { class: "quiet" }, note)];
}

function pre({ text: words, wrap }) {
  return el("pre", { class: wrap && "wrap", tabindex: 0 }, words);
}

function spans({ lines, caption }) {
  const marked = lines.map((parts) => el("div", { class: "span-line" },
    parts.map(({ text: words, tone }) => el(tone === "loss" ? "mark" : "span",
      { class: tone }, words))));
  return el("figure", { class: "spans" },
    caption && el("figcaption", { class: "quiet" }, caption), el("pre", { tabindex: 0 }, marked));
}

function details({ summary, blocks, open }, context) {
  return el("details", { open }, el("summary", {}, summary),
    el("div", { class: "details-body" }, renderBlocks(blocks, context)));
}

function pictures({ items }) {
  return el("div", { class: "pictures" }, items.map(({ caption, src }) => {
    return el("figure", {}, isOurPicture(src) && image(src, caption),
      el("figcaption", {}, caption));
  }));
}

function image(src, alt) {
  const shown = el("img", { alt, loading: "lazy" });
  shown.addEventListener("load", () => {
    shown.classList.toggle("large", shown.naturalWidth >= LARGE);
  });
  shown.src = src;
  return shown;
}

function isOurPicture(src) {
  return src.startsWith("data:image/png;base64,") || src.startsWith("/api/");
}
