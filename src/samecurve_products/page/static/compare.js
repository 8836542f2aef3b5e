/** Curves of several runs over each other, what differs in their configs, and their bits. */

import { el, fill } from "/page/dom.js";
import { read } from "./api.js";
import { doing } from "./dialogs.js";
import { PageView } from "./page_view.js";

/** Page #/compare?runs=a,b. */
export class ComparePage extends PageView {
  title = "Compare";

  constructor(app, { query }) {
    const ids = (query.get("runs") ?? "").split(",").filter(Boolean);
    super(app, `/api/compare?runs=${ids.map(encodeURIComponent).join(",")}`);
    this.ids = ids;
    this.choice = el("ul", { class: "chosen", "aria-label": "Runs that are compared" });
    this.add = el("select", { "aria-label": "Add a run", onchange: () => this.go([...this.ids,
      this.add.value]) });
    this.answer = el("div", { "aria-live": "polite" });
    this.ask = el("button", { type: "button", onclick: () => this.askExact() },
      "Equal to the last bit?");
    this.element = el("div", {}, el("h1", {}, "Compare"),
      el("div", { class: "toolbar" }, this.choice, this.add, el("span", { class: "space" }),
        this.ids.length > 1 && this.ask),
      this.answer, this.content);
  }

  async start() {
    await Promise.all([this.offer(), this.ids.length > 1 ? super.start() : this.explain()]);
  }

  shownBlocks(blocks) {
    return blocks.filter(({ type }) => type !== "header");
  }

  explain() {
    this.content.removeAttribute("aria-busy");
    fill(this.content, el("section", { class: "empty" }, el("h2", {}, "Choose two runs or more"),
      el("p", {}, "Add them above, or mark them in the list of ",
        el("a", { href: "#/runs" }, "runs"), ". The same config on one device and on four gives "
        + "one curve: lay them over each other and see.")));
  }

  async offer() {
    try {
      const { runs } = await read("/api/runs");
      const chosen = this.ids.map((id) => runs.find((run) => run.id === id) ?? { id, name: id });
      fill(this.choice, chosen.map(({ id, name }, index) => el("li", {},
        el("span", { class: "swatch", style: { "--colour": `var(--s${index % 8})` } }),
        el("a", { href: `#/run/${id}` }, name),
        el("button", { type: "button", class: "icon-button small", "aria-label": `Remove ${name}`,
          onclick: () => this.go(this.ids.filter((other) => other !== id)) }, "×"))));
      const rest = runs.filter(({ id }) => !this.ids.includes(id));
      this.add.hidden = !rest.length;
      fill(this.add, el("option", { value: "" }, "Add a run …"),
        rest.map(({ id, name }) => el("option", { value: id }, name)));
    } catch (error) {
      this.app.failed(error);
    }
  }

  go(ids) {
    location.hash = `#/compare?runs=${ids.join(",")}`;
  }

  async askExact() {
    const path = `/api/compare/bits?runs=${this.ids.map(encodeURIComponent).join(",")}`;
    const answer = await doing(this.ask, () => read(path));
    if (!answer) return;
    const tones = new Map([[true, "good"], [false, "warn"]]);
    const tone = tones.get(answer.equal) ?? "quiet";
    const sign = { good: "=", warn: "≠", quiet: "?" }[tone];
    fill(this.answer, el("div", { class: `note ${tone}` },
      el("span", { class: "note-sign", "aria-hidden": "true" }, sign),
      el("div", {}, answer.lines.map((line) => el("p", {}, line)))));
  }
}
