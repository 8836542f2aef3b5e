/** The bar above the charts: what x is, how smooth the lines are, show all. */

import { axisLabel } from "./arrays.js";
import { el, fill } from "./dom.js";

/** Controls of a page's charts. `refresh()` offers the x axes that the runs have now. */
export class ChartTools {
  constructor(view, runs) {
    this.view = view;
    this.runs = runs;
    this.axes = el("div", { class: "segments", role: "group", "aria-label": "Horizontal axis" });
    this.smooth = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smooth,
      oninput: () => view.set({ smooth: Number(this.smooth.value) }) });
    this.all = el("button", { type: "button", class: "chip", onclick: () => view.set({
      range: null }) }, "Show all");
    this.element = el("div", { class: "chart-tools" }, this.axes,
      el("label", {}, "Smoothing", this.smooth), this.all,
      el("span", { class: "quiet hint" }, "Drag to zoom, double click to show all"));
    view.listeners.add(() => this.showState());
    this.refresh();
  }

  refresh() {
    const kinds = [...new Set(this.runs.flatMap((run) => run.axes()))];
    if (kinds.join() !== this.kinds) {
      this.kinds = kinds.join();
      this.buttons = kinds.map((kind) => el("button", { type: "button", value: kind,
        onclick: () => this.view.set({ kind }) }, axisLabel(kind)));
      fill(this.axes, this.buttons);
    }
    this.axes.hidden = kinds.length < 2;
    this.showState();
  }

  showState() {
    this.all.disabled = this.view.range === null;
    for (const button of this.buttons) {
      button.setAttribute("aria-pressed", String(button.value === this.view.kind));
    }
  }
}
