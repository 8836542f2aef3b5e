/** A run while it goes on, and after: what it does, its curves, devices, samples, logs and plan. */

import { RunColumns } from "/page/arrays.js";
import { PageContext, renderBlocks } from "/page/blocks.js";
import { el, fill } from "/page/dom.js";
import { Poller, read } from "./api.js";
import { speak } from "./dialogs.js";
import { LogsPanel } from "./logs.js";
import { RunActions } from "./run_actions.js";
import { SensorsPanel } from "./sensors.js";
import { isLive, stateBadge } from "./states.js";

const tabs = ["Curves", "Devices", "Samples", "Logs", "Plan"];
const firstCards = 6; // a row of them stands above the curves, the others below
const deviceCharts = new Set(["memory", "utilisation", "memory-time", "power-watts", "celsius"]);

/** Page #/run/ID. */
export class RunPage {
  title = "Run";

  constructor(app, { id, query }) {
    this.id = id;
    this.path = `/api/runs/${encodeURIComponent(id)}`;
    this.runs = [];
    this.context = new PageContext(this.runs);
    this.poller = new Poller((signal) => this.load(signal), app.failed);
    this.actions = new RunActions(app, this.path, () => this.poller.now());
    this.sensors = new SensorsPanel();
    this.logs = new LogsPanel(this.path, app.failed);
    this.build();
    this.open(tabs.find((tab) => tab.toLowerCase() === query.get("tab")) ?? "Curves");
  }

  start() {
    this.poller.start();
  }

  stop() {
    this.poller.stop();
    this.logs.stop();
    this.context.destroy();
  }

  build() {
    this.name = el("h1", {}, "…");
    this.badge = el("span");
    this.about = el("p", { class: "quiet" });
    this.reading = el("p", { class: "quiet", hidden: true });
    const part = () => el("div");
    this.parts = { top: part(), cards: part(), charts: part(), numbers: part(), rest: part(),
      devices: part(), samples: part(), plan: part() };
    this.tabs = new Map(tabs.map((tab) => [tab, el("a", { href: this.address(tab),
      onclick: (event) => this.clicked(event, tab) }, tab)]));
    const { parts } = this;
    this.panels = new Map([
      ["Curves", el("section", { "aria-label": "Curves" }, parts.cards, parts.charts, parts.numbers,
        parts.rest)],
      ["Devices", el("section", { "aria-label": "Devices" }, this.sensors.element, parts.devices)],
      ["Samples", el("section", { "aria-label": "Samples" }, parts.samples)],
      ["Logs", el("section", { "aria-label": "Logs" }, this.logs.element)],
      ["Plan", el("section", { "aria-label": "Plan" }, parts.plan)],
    ]);
    this.element = el("div", {},
      el("div", { class: "page-head" }, el("div", {},
        el("div", { class: "page-header" }, this.name, this.badge), this.about),
      this.actions.element), this.reading, parts.top,
      el("nav", { class: "segments tabs", "aria-label": "Parts of the run" },
        [...this.tabs.values()]),
      [...this.panels.values()]);
  }

  address(tab) {
    return `#/run/${this.id}?tab=${tab.toLowerCase()}`;
  }

  clicked(event, tab) {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    history.replaceState(null, "", this.address(tab));
    this.open(tab);
  }

  open(tab) {
    this.tab = tab;
    for (const [name, panel] of this.panels) {
      panel.hidden = name !== tab;
      this.tabs.get(name).setAttribute("aria-current", String(name === tab));
    }
    if (tab === "Logs") this.logs.start();
    else this.logs.stop();
  }

  async load(signal) {
    const [run] = this.runs;
    const known = new URLSearchParams({ generation: run?.generation ?? "", count: run?.count ?? 0,
      blocks: this.hash ?? "" });
    const answer = await read(`${this.path}/page?${known}`, { signal });
    const grown = this.takeColumns(answer.runs);
    this.showState(answer);
    if (answer.page) this.draw(answer.page);
    else if (grown) this.context.update();
    this.hash = answer.hash;
    this.sensors.show(answer.sensors?.devices ?? []);
    const changed = grown || answer.page !== undefined;
    if (answer.reading < 1) return 500;
    if (!answer.live) return 5000;
    this.calm = changed ? 0 : (this.calm ?? 0) + 1;
    return this.calm > 10 ? 2000 : 500;
  }

  takeColumns(sent) {
    let changed = false;
    sent.forEach(({ name, colour, columns }, index) => {
      this.runs[index] ??= new RunColumns(name, colour);
      changed = this.runs[index].update(columns) || changed;
    });
    return changed;
  }

  showState({ state, live, actions, devices, reading }) {
    if (state !== this.state) {
      if (this.state) speak(`The run is ${state}`);
      fill(this.badge, stateBadge(state));
      this.state = state;
      this.logs.isLive = live || isLive(state);
    }
    this.actions.show(actions, live, devices);
    const part = reading === undefined ? 1 : reading;
    this.reading.hidden = part >= 1;
    if (part < 1) fill(this.reading, `Reading the journal: ${Math.floor(part * 100)} %`);
  }

  draw({ title, head, charts, static: fixed }) {
    const { parts } = this;
    const header = head.find(({ type }) => type === "header");
    fill(this.name, title);
    fill(this.about, header?.quiet ?? "");
    document.title = `${title} · Samecurve`;
    this.actions.name = title;
    const [first, ...sections] = splitSections(head.filter((block) => block !== header));
    const samples = sections.filter(isSamples);
    const isNote = ({ type, tone }) => type === "text" && tone !== "quiet";
    this.put("top", first.filter(isNote));
    const cards = first.find(({ type }) => type === "cards")?.items ?? [];
    this.put("cards", [{ type: "cards", items: cards.slice(0, firstCards) }]);
    this.put("numbers", [{ type: "cards", items: cards.slice(firstCards) }]);
    this.put("rest", sections.filter((section) => !isSamples(section)).flat());
    this.put("samples", samples.length ? samples.flat() : [nothing("No samples yet. The config's "
      + "train.sample_every says how often the model shows what it makes; while the run goes on, "
      + "“Sample now” asks for some.")]);
    const ofDevices = charts.filter(({ name }) => deviceCharts.has(name));
    const curves = charts.filter((block) => block.type !== "heading" && !ofDevices.includes(block));
    const isDrawn = curves.some(({ type }) => type === "chart");
    this.put("charts", isDrawn ? curves : [nothing("The first points are drawn after the "
      + "first steps.")]);
    this.put("devices", ofDevices.length ? ofDevices : [nothing("Curves of utilisation and power "
      + "appear here where the devices tell them.")]);
    this.put("plan", [...first.filter(({ type }) => type === "pre"), ...fixed]);
    this.context.keepOnly([...charts, ...head, ...fixed]);
  }

  /** Draw one part again if its blocks have changed. */
  put(part, blocks) {
    const text = JSON.stringify(blocks);
    this.drawn ??= {};
    if (this.drawn[part] === text) return;
    this.drawn[part] = text;
    fill(this.parts[part], renderBlocks(blocks, this.context));
  }
}

/** Blocks before the first heading, then each heading with what follows it. */
function splitSections(blocks) {
  const sections = [[]];
  for (const block of blocks) {
    if (block.type === "heading" && block.level === 2) sections.push([]);
    sections.at(-1).push(block);
  }
  return sections;
}

function isSamples([heading]) {
  return /^samples/i.test(heading.text);
}

function nothing(text) {
  return { type: "text", tone: "quiet", text };
}
