/** The list of runs, with the queue above it. Rows keep their place in the page when polled. */

import { el, fill } from "/page/dom.js";
import { formatInteger, formatMoment, formatSeconds } from "/page/numbers.js";
import { Poller, read, write } from "./api.js";
import { ask, doing, tell } from "./dialogs.js";
import { Queue } from "./queue.js";
import { isLive, lossText, progress, progressBar, rateText, stateBadge } from "./states.js";

const columns = [
  { title: "Name", by: (run) => run.name },
  { title: "State", by: (run) => run.state },
  { title: "Task", by: (run) => run.task },
  { title: "Devices", by: (run) => run.devices },
  { title: "Step", by: (run) => run.step, number: true },
  { title: "Loss", by: (run) => run.loss, number: true },
  { title: "Throughput", by: (run) => run.rate?.value, number: true },
  { title: "Started", by: (run) => run.started, number: true },
  { title: "Duration", by: (run) => run.seconds, number: true },
];

/** Page #/runs. `?follow=JOB`: goes on to the run of that job as soon as it has one. */
export class RunsPage {
  title = "Runs";

  constructor(app, { query }) {
    this.app = app;
    this.follow = query.get("follow");
    this.roots = new Map();
    this.rows = new Map();
    this.chosen = new Set();
    this.sort = { column: 7, down: true };
    this.queue = new Queue(() => this.poller.now());
    this.poller = new Poller((signal) => this.load(signal), app.failed);
    this.build();
  }

  start() {
    this.poller.start();
  }

  stop() {
    this.poller.stop();
  }

  build() {
    const redraw = () => this.show();
    this.text = el("input", { type: "search", placeholder: "Filter by name",
      "aria-label": "Filter by name", oninput: redraw });
    this.state = el("select", { "aria-label": "State", onchange: redraw });
    this.task = el("select", { "aria-label": "Task", onchange: redraw });
    this.compare = el("button", { type: "button", class: "primary", disabled: true,
      onclick: () => this.openCompare() }, "Compare");
    this.count = el("span", { class: "quiet" });
    this.heads = columns.map((column, index) => el("th", { scope: "col",
      class: column.number && "number" },
    el("button", { type: "button", onclick: () => this.sortBy(index) }, column.title)));
    this.body = el("tbody");
    this.list = el("div", { class: "scroll wide-table", tabindex: 0, role: "region",
      "aria-label": "Runs" }, el("table", {}, el("thead", {}, el("tr", {},
      el("th", { scope: "col" }, el("span", { class: "unseen" }, "Choose to compare")),
      this.heads, el("th", { scope: "col" }, el("span", { class: "unseen" }, "Delete")))),
    this.body));
    this.filters = el("div", { class: "toolbar" }, this.text, this.state, this.task, this.count,
      el("span", { class: "space" }), this.compare);
    this.empty = el("section", { class: "empty", hidden: true },
      el("h2", {}, "No runs yet"),
      el("p", {}, "Set one up in the browser, or start one in a terminal: ",
        el("code", {}, "samecurve train"), ". It is listed here as soon as it starts, "
        + "whoever started it."),
      el("a", { class: "button primary", href: "#/new" }, "New run"));
    this.element = el("div", {}, el("div", { class: "page-head" }, el("h1", {}, "Runs"),
      el("a", { class: "button", href: "#/new" }, "New run")),
    this.queue.element, this.filters, this.list, this.empty);
    this.filters.hidden = this.list.hidden = true;
  }

  async load(signal) {
    const { roots } = await this.app.state();
    this.roots = new Map(roots.length > 1 ? roots.map(({ id, name }) => [id, name]) : []);
    const { runs, jobs } = await read("/api/runs", { signal });
    this.runs = runs;
    this.queue.show(jobs);
    const started = jobs.find(({ id }) => id === this.follow);
    if (started?.run_id) location.replace(`#/run/${started.run_id}`);
    const text = JSON.stringify(runs);
    const changed = text !== this.before;
    this.before = text;
    if (changed) this.show();
    if (changed && runs.some(({ state }) => isLive(state))) return 1000;
    if (this.follow) return 500;
    return this.queue.isActive || runs.some(({ state }) => isLive(state)) ? 2000 : 5000;
  }

  show() {
    if (!this.runs) return;
    this.offer(this.state, "All states", this.runs.map(({ state }) => state));
    this.offer(this.task, "All tasks", this.runs.map(({ task }) => task));
    const found = this.sorted(this.runs.filter((run) => this.matches(run)));
    this.empty.hidden = this.runs.length > 0;
    this.list.hidden = this.filters.hidden = !this.runs.length;
    const all = formatInteger(this.runs.length);
    const noun = this.runs.length === 1 ? "run" : "runs";
    fill(this.count, found.length === this.runs.length ? `${all} ${noun}`
      : `${formatInteger(found.length)} of ${all} ${noun}`);
    const elements = found.map((run) => this.row(run));
    if (elements.some((row, index) => row !== this.body.children[index])
      || elements.length !== this.body.children.length) this.body.replaceChildren(...elements);
    const known = new Set(this.runs.map(({ id }) => id));
    for (const id of this.rows.keys()) if (!known.has(id)) this.rows.delete(id);
    for (const id of this.chosen) if (!known.has(id)) this.chosen.delete(id);
    this.showChosen();
    this.heads.forEach((head, index) => {
      const direction = this.sort.down ? "descending" : "ascending";
      head.setAttribute("aria-sort", index === this.sort.column ? direction : "none");
    });
  }

  offer(select, all, values) {
    const options = [...new Set(values)].filter(Boolean).sort();
    if (select.dataset.options === options.join("\n")) return;
    select.dataset.options = options.join("\n");
    const { value } = select;
    fill(select, el("option", { value: "" }, all),
      options.map((option) => el("option", { value: option }, option)));
    select.value = options.includes(value) ? value : "";
  }

  matches(run) {
    const text = this.text.value.trim().toLowerCase();
    const texts = [run.name, this.roots.get(run.root), run.strategy, run.devices];
    const words = texts.join(" ").toLowerCase();
    return (!text || words.includes(text)) && (!this.state.value || run.state === this.state.value)
      && (!this.task.value || run.task === this.task.value);
  }

  sorted(runs) {
    const { by } = columns[this.sort.column];
    const sign = this.sort.down ? -1 : 1;
    const rank = (run) => by(run) ?? -Infinity;
    return [...runs].sort((a, b) => {
      const [left, right] = [rank(a), rank(b)];
      if (left === right) return 0;
      return left < right ? -sign : sign;
    });
  }

  sortBy(column) {
    const same = column === this.sort.column;
    this.sort = { column, down: same ? !this.sort.down : Boolean(columns[column].number) };
    this.show();
  }

  /** The row of a run. It is made once; later only changed texts are written. */
  row(run) {
    const known = this.rows.get(run.id) ?? this.makeRow(run);
    this.rows.set(run.id, known);
    known.run = run;
    const { text, share } = progress(run);
    const cells = [
      [run.state, () => stateBadge(run.state)],
      [run.task],
      [[run.devices, run.strategy].join("\n"), () => [run.devices,
        el("div", { class: "quiet" }, run.strategy)]],
      [text, () => [text, isLive(run.state) && share !== null && progressBar(share)]],
      [lossText(run.loss)],
      [rateText(run.rate)],
      [run.started ? formatMoment(run.started) : "–"],
      [run.seconds ? formatSeconds(run.seconds) : "–"],
    ];
    cells.forEach(([key, make], index) => {
      if (known.keys[index] === key) return;
      known.keys[index] = key;
      fill(known.cells[index], make ? make() : key);
    });
    known.remove.disabled = isLive(run.state);
    known.cause.hidden = !run.cause;
    if (run.cause && known.cause.textContent !== run.cause) fill(known.cause, run.cause);
    return known.element;
  }

  makeRow({ id, name, root }) {
    const entry = { keys: [] };
    entry.cells = columns.slice(1).map(({ number }) => el("td", { class: number && "number" }));
    entry.cause = el("div", { class: "bad cause" });
    entry.remove = el("button", { type: "button", class: "icon-button", title: "Delete",
      "aria-label": `Delete ${name}`, onclick: () => this.remove(entry) }, "×");
    const check = el("input", { type: "checkbox", "aria-label": `Compare ${name}`,
      onchange: () => this.choose(id, check.checked) });
    entry.element = el("tr", {}, el("td", {}, check),
      el("th", { scope: "row" }, el("a", { href: `#/run/${id}` }, name),
        this.roots.has(root) && el("div", { class: "quiet" }, this.roots.get(root)), entry.cause),
      entry.cells, el("td", {}, entry.remove));
    return entry;
  }

  choose(id, chosen) {
    if (chosen) this.chosen.add(id);
    else this.chosen.delete(id);
    this.showChosen();
  }

  showChosen() {
    this.compare.disabled = this.chosen.size < 2;
    const number = this.chosen.size;
    fill(this.compare, number ? `Compare ${number} run${number > 1 ? "s" : ""}` : "Compare");
    this.compare.title = number < 2 ? "Choose two runs or more in the list" : "";
  }

  openCompare() {
    location.hash = `#/compare?runs=${[...this.chosen].join(",")}`;
  }

  async remove({ run, remove }) {
    const steps = run.step ? `${formatInteger(run.step)} steps` : "no steps";
    const answer = await ask({
      title: `Delete ${run.name}?`,
      body: el("p", {}, `The run has ${steps}. Its directory with checkpoints, logs and samples is `
        + "removed from the disk. This can't be undone."),
      action: "Delete",
      tone: "bad",
    });
    if (!answer) return;
    const done = await doing(remove, () => write(`/api/runs/${run.id}`, {}, { method: "DELETE" }));
    if (done) tell(`${run.name} is deleted`);
    this.poller.now();
  }
}
