/** The choice of what a new run begins from: a preset, a config of a folder, a run to repeat. */

import { el, fill, withCode } from "/page/dom.js";
import { read } from "./api.js";

/** All bases, and the one that is chosen. changed(base): {kind, id}. */
export class BaseChoice {
  constructor(changed) {
    this.changed = changed;
    this.kind = "preset";
    this.kinds = el("div", { class: "segments", role: "group", "aria-label": "Begin from" });
    this.list = el("div");
    this.element = el("section", { class: "bases", "aria-label": "Begin from" }, this.kinds,
      this.list);
  }

  /** Ask for the bases; `chosen` is marked. */
  async load(chosen) {
    this.bases = await read("/api/form/bases");
    this.show(chosen);
  }

  /** The title of a base, once the bases are loaded. */
  titleOf(base) {
    const { presets, configs, runs, tasks = [] } = this.bases ?? {};
    const rows = { preset: presets, config: configs, run: runs, empty: tasks }[base?.kind];
    const row = rows?.find(({ id }) => id === base.id);
    return row?.path ?? row?.title ?? row?.name ?? "";
  }

  show(chosen) {
    this.chosen = chosen;
    if (chosen) this.kind = chosen.kind;
    const { presets, configs, runs, tasks = [] } = this.bases;
    const kinds = [["preset", "A preset", presets], ["config", "A config", configs],
      ["run", "A run to repeat", runs], ["empty", "Nothing", tasks]];
    fill(this.kinds, kinds.filter(([, , rows]) => rows.length || rows === presets)
      .map(([kind, label]) => el("button", { type: "button",
        "aria-pressed": String(kind === this.kind), onclick: () => this.open(kind) }, label)));
    this.open(this.kind);
  }

  open(kind) {
    this.kind = kind;
    const { presets, configs, runs, tasks = [] } = this.bases;
    [...this.kinds.children].forEach((button) => button.setAttribute("aria-pressed",
      String(button.textContent === { preset: "A preset", config: "A config",
        run: "A run to repeat", empty: "Nothing" }[kind])));
    if (kind === "preset") fill(this.list, this.presetCards(presets));
    else if (kind === "config") {
      fill(this.list, this.select(configs, ({ path, root, title, task }) => [
        `${root}/${path}`, title, task].filter(Boolean).join(" · ")));
    } else if (kind === "run") fill(this.list, this.select(runs, ({ name }) => name));
    else fill(this.list, this.select(tasks, ({ title }) => `A new config of the task ${title}`));
  }

  presetCards(presets) {
    return el("div", { class: "presets", role: "group", "aria-label": "Presets" },
      presets.map(({ id, title, text, task }) => el("button", { type: "button", class: "preset",
        "aria-pressed": String(this.isChosen("preset", id)),
        onclick: () => this.choose("preset", id) }, el("strong", {}, title),
      el("span", { class: "quiet" }, withCode(text)), el("span", { class: "preset-task" }, task))));
  }

  select(rows, words) {
    const { kind } = this;
    const select = el("select", { "aria-label": "Begin from", class: "base-select",
      onchange: () => select.value && this.choose(kind, select.value) },
    el("option", { value: "" }, "Choose …"),
    rows.map((row) => el("option", { value: row.id }, words(row))));
    if (this.chosen?.kind === kind) select.value = this.chosen.id;
    return select;
  }

  isChosen(kind, id) {
    return this.chosen?.kind === kind && this.chosen.id === id;
  }

  choose(kind, id) {
    this.chosen = { kind, id };
    this.open(kind);
    this.changed(this.chosen);
  }
}
