/**
 * Charts that share one cursor, one zoom, one x axis and one smoothing: the page's view.
 *
 * A chart keeps its figure when its block or its numbers change, so nothing jumps.
 */

import { axisFormat, axisLabel, extremes } from "./arrays.js";
import { colourName, el, fill, onThemeChange, themeColour } from "./dom.js";
import { drawErrors, drawMarks, plotAxis, plotAxisWidth } from "./drawing.js";
import { chartTable, lineNumbers, valueAt } from "./lines.js";
import { formatValue } from "./numbers.js";

const shares = { low: 0, high: 0, raw: 0.3, main: 1, under: 0.55 }; // of opacity
const dashes = [[], [6, 4], [2, 3], [8, 3, 2, 3]];

/** What all charts of a page share. */
export class ChartView {
  constructor() {
    this.kind = "step";
    this.smooth = 0;
    this.range = null;
    this.charts = new Set();
    this.listeners = new Set();
    onThemeChange(() => this.charts.forEach((chart) => chart.plot?.redraw()));
  }

  /** Change some of {kind, smooth, range} and draw all charts again. */
  set(changes) {
    if (changes.kind && changes.kind !== this.kind) this.range = null;
    Object.assign(this, changes);
    this.charts.forEach((chart) => chart.update());
    this.listeners.forEach((changed) => changed());
  }
}

/** One chart: a figure with a title, the drawing, a legend of switches and a text summary. */
export class Chart {
  /** runs: a list of RunColumns, read again at each `update`. */
  constructor(block, runs, view) {
    this.runs = runs;
    this.view = view;
    this.hidden = new Set();
    this.log = false;
    this.range = null;
    this.visible = false;
    this.build();
    this.setBlock(block);
    view.charts.add(this);
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.holder);
    this.watching = new IntersectionObserver((entries) => this.show(entries.at(-1).isIntersecting),
      { rootMargin: "400px" });
    this.watching.observe(this.element);
  }

  /** Take another description of the same chart. */
  setBlock(block) {
    this.block = block;
    fill(this.title, block.title);
    fill(this.note, block.note ?? "");
    this.logButton.hidden = !block.y.log;
    this.makeLegend();
    this.stale = true;
    this.update();
  }

  /** Draw what the runs hold now. */
  update() {
    this.stale = true;
    if (!this.visible) return;
    this.stale = false;
    this.kind = this.block.x?.kind === "own" ? "own" : this.view.kind;
    this.lines = this.block.lines.map((line) => lineNumbers(line, this.runs, this.kind));
    const smooth = this.block.smooth ? this.view.smooth : 0;
    this.table = chartTable(this.lines, { smooth, log: this.log });
    const form = JSON.stringify([this.table.series, this.log, this.kind, this.block.lines.map(
      ({ label, colour, dash, points }) => [label, colour, dash, points])]);
    if (form === this.form) {
      this.plot.setData(this.table.data, false);
      this.rescale();
    } else {
      this.form = form;
      this.draw();
    }
    this.readOut();
    this.summarize();
  }

  /** Draw only what is near the window. */
  show(visible) {
    this.visible = visible;
    if (visible && this.stale) this.update();
  }

  destroy() {
    this.view.charts.delete(this);
    this.resizing.disconnect();
    this.watching.disconnect();
    this.plot?.destroy();
  }

  build() {
    this.title = el("strong", { class: "chart-title" });
    this.note = el("span", { class: "quiet" });
    this.place = el("span", { class: "chart-place quiet" });
    this.logButton = el("button", { type: "button", class: "chip", "aria-pressed": "false",
      title: "Logarithmic scale", onclick: () => this.switchLog() }, "log");
    this.holder = el("div", { class: "plot", tabindex: 0, role: "group",
      "aria-label": "Chart. Arrow keys read values, + and - zoom, Escape shows all.",
      onkeydown: (event) => this.key(event), onblur: () => this.plot?.setCursor(nowhere) });
    this.tip = el("div", { class: "chart-tip", hidden: true });
    this.legend = el("ul", { class: "legend" });
    this.summary = el("p", { class: "unseen" });
    this.element = el("figure", { class: "chart" },
      el("figcaption", {}, el("span", {}, this.title, " ", this.note), this.place, this.logButton),
      this.holder, this.legend, this.summary);
  }

  makeLegend() {
    const { lines } = this.block;
    this.values = lines.map(() => el("span", { class: "legend-value" }));
    fill(this.legend, lines.map((line, index) => el("li", {}, el("button", {
      type: "button", "aria-pressed": String(!this.hidden.has(index)), title: "Show or hide",
      onclick: (event) => this.switchLine(index, event.currentTarget),
    }, el("span", { class: `swatch dash-${(line.dash ?? 0) % 4}`,
      style: { "--colour": `var(--${colourName(line.colour)})` } }),
    el("span", {}, line.label), this.values[index]))));
  }

  switchLine(index, button) {
    const show = this.hidden.has(index);
    if (show) this.hidden.delete(index);
    else this.hidden.add(index);
    button.setAttribute("aria-pressed", String(show));
    this.form = null;
    this.update();
  }

  switchLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.update();
  }

  get xFormat() {
    return this.kind === "own" ? "number" : axisFormat(this.kind);
  }

  draw() {
    this.plot?.destroy();
    const { series, bands, data } = this.table;
    const { x, y } = this.block;
    const own = this.kind === "own";
    this.plot = new uPlot({
      width: this.width(),
      height: this.height(),
      legend: { show: false },
      padding: [10, 18, 0, 0],
      scales: {
        x: { time: false, range: (_, low, high) => this.xRange(low, high),
          ...(x?.log2 && { distr: 3, log: 2 }) },
        y: { range: (_, low, high) => this.yRange(low, high), ...(this.log && { distr: 3 }) },
      },
      axes: [
        plotAxis({ format: this.xFormat, space: 84, ticks: x?.ticks, size: 28,
          label: own ? x.label : null, labelSize: own ? 16 : 0 }),
        plotAxis({ format: y.format, space: 38, log: this.log, size: plotAxisWidth, label: y.label,
          labelSize: 20 }),
      ],
      series: [{}, ...series.map((entry) => this.style(entry))],
      bands: bands.map(({ series: pair, index }) => ({ series: pair,
        fill: () => this.colour(index, 0.16) })),
      cursor: {
        y: false,
        points: { size: (_, index) => (series[index - 1]?.part === "main" ? 7 : 0), width: 1.5 },
        drag: { x: true, y: false, setScale: false },
        sync: { key: own ? null : "page", scales: ["x", null],
          filters: { pub: (type) => type.startsWith("mousem") || type === "mouseleave" } },
        bind: { dblclick: () => () => this.zoom(null) },
      },
      hooks: {
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [() => this.readOut()],
        draw: [(plot) => this.drawOver(plot)],
      },
    }, data, this.holder);
    this.plot.over.append(this.tip);
  }

  style({ part, index }) {
    const line = this.block.lines[index];
    const edge = part === "low" || part === "high";
    const share = shares[part === "main" && this.under(index) ? "under" : part];
    const dots = part === "main" && (line.points || this.lines[index].x.length === 1);
    return {
      show: !this.hidden.has(index),
      stroke: () => this.colour(index, share),
      width: edge ? 0 : (line.width ?? (part === "raw" ? 1 : 1.75 + this.under(index))),
      dash: dashes[(line.dash ?? 0) % dashes.length],
      points: { show: dots, size: 6, fill: () => this.colour(index, 1) },
      pxAlign: 0,
    };
  }

  /** Extra width of a run's line under those of other runs, so that equal curves are all seen. */
  under(index) {
    const { lines } = this.block;
    const { column } = lines[index];
    const above = lines.slice(index + 1).filter((line) => column && line.column === column);
    return above.length < 4 ? 2.25 * above.length : 0;
  }

  colour(index, share) {
    const colour = themeColour(colourName(this.block.lines[index].colour));
    return share === 1 ? colour : colour.replace(/rgb\((.*)\)/, `rgba($1, ${share})`);
  }

  xRange(low, high) {
    const range = this.kind === "own" ? this.range : this.view.range;
    if (range) return range;
    if (low === null) return [0, 1];
    const { ticks, log2 } = this.block.x ?? {};
    if (!ticks?.length) return low === high ? [low - 1, high + 1] : [low, high];
    const [first, last] = [Math.min(low, ...ticks), Math.max(high, ...ticks)];
    return log2 ? [first / 1.1, last * 1.1] : [first - 0.1, last + 0.1];
  }

  yRange(low, high) {
    if (low === null || low === undefined) return this.log ? [1, 10] : [0, 1];
    if (this.log) return low === high ? [low / 2, high * 2] : [low * 0.95, high * 1.05];
    const spread = high - low || Math.abs(high) || 1;
    const bottom = this.block.y.from_zero ? Math.min(0, low) : low - spread * 0.06;
    return [bottom, high + spread * 0.06];
  }

  rescale() {
    const [x] = this.table.data;
    const [low, high] = this.xRange(x[0] ?? null, x.at(-1) ?? null);
    this.plot.setScale("x", { min: low, max: high });
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width > 3) this.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  /** Show x from range[0] to range[1] in all charts of the page; null: everything. */
  zoom(range) {
    if (this.kind !== "own") {
      this.view.set({ range });
      return;
    }
    this.range = range;
    this.rescale();
  }

  key(event) {
    const { key } = event;
    if (!this.plot) return;
    const { min, max } = this.plot.scales.x;
    if (key === "ArrowLeft" || key === "ArrowRight") this.moveCursor(key === "ArrowLeft" ? -1 : 1);
    else if (key === "+" || key === "-") {
      const half = (max - min) * (key === "+" ? 0.25 : 1);
      const middle = this.cursorX() ?? (min + max) / 2;
      this.zoom([middle - half, middle + half]);
    } else if (key === "Escape") this.zoom(null);
    else return;
    event.preventDefault();
  }

  moveCursor(by) {
    const [x] = this.plot.data;
    const now = this.cursorX();
    const index = now === null ? x.length - 1 : this.plot.valToIdx(now) + by;
    const wanted = x[Math.max(0, Math.min(x.length - 1, index))];
    if (wanted !== undefined) {
      this.plot.setCursor({ left: this.plot.valToPos(wanted, "x"), top: 0 });
    }
  }

  cursorX() {
    const left = this.plot?.cursor.left ?? -1;
    return left >= 0 ? this.plot.posToVal(left, "x") : null;
  }

  drawOver(plot) {
    const shown = this.lines.map((line, index) => ({ ...line, index }))
      .filter(({ errors, index }) => errors && !this.hidden.has(index));
    drawErrors(plot, shown, (index) => this.colour(index, 1));
    drawMarks(plot, this.marks());
  }

  /** Values where the cursor is, or the last ones. */
  readOut() {
    if (!this.lines) return;
    const wanted = this.cursorX();
    let place = null;
    this.lines.forEach((numbers, index) => {
      const value = valueAt(numbers, wanted);
      if (value && !this.hidden.has(index)) place = Math.max(place ?? value.x, value.x);
      fill(this.values[index], value ? formatValue(value.y, this.block.y.format) : "–");
    });
    const shown = formatValue(place, this.xFormat);
    const words = this.kind === "own" ? `${shown} ${this.block.x.label}`
      : `${axisLabel(this.kind).toLowerCase()} ${shown}`;
    fill(this.place, place === null ? "" : words);
    this.showTip();
  }

  showTip() {
    const left = this.plot?.cursor.left ?? -1;
    const near = left < 0 ? [] : this.marks().filter(({ x }) => {
      return Math.abs(this.plot.valToPos(x, "x") - left) < 6;
    });
    this.tip.hidden = !near.length;
    if (!near.length) return;
    fill(this.tip, near.slice(0, 4).map(({ text }) => el("div", {}, text)),
      near.length > 4 && el("div", {}, `and ${near.length - 4} more`));
    this.tip.classList.toggle("to-left", left > this.plot.over.clientWidth / 2);
    this.tip.style.left = `${left}px`;
  }

  marks() {
    if (this.kind === "own") return [];
    return (this.block.marks ?? []).map((mark) => {
      const run = this.runs[mark.run ?? 0];
      return { ...mark, x: run ? run.toAxis([mark.step], this.kind)[0] : mark.step };
    });
  }

  summarize() {
    const show = (value) => formatValue(value, this.block.y.format);
    const parts = this.lines.map(({ line, y }) => {
      const found = extremes(y);
      if (!found) return `${line.label}: no numbers.`;
      return `${line.label}: last ${show(y[found.last])}, lowest ${show(y[found.lowest])}, `
        + `highest ${show(y[found.highest])}.`;
    });
    const marks = (this.block.marks ?? []).slice(0, 10).map(({ text }) => text);
    fill(this.summary, [...parts, ...marks].join(" "));
  }

  width() {
    return Math.max(200, this.holder.clientWidth || 400);
  }

  height() {
    return this.width() > 700 ? 320 : 230;
  }

  resize() {
    if (this.plot && this.plot.width !== this.width()) {
      this.plot.setSize({ width: this.width(), height: this.height() });
    }
  }
}

const nowhere = { left: -10, top: -10 };
