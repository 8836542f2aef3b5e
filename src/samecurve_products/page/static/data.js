/** What a task will read: its first samples as they go into the model, counts, what was skipped. */

import { PageContext, renderBlocks } from "/page/blocks.js";
import { el, fill } from "/page/dom.js";
import { ApiError, write } from "./api.js";
import { BaseChoice } from "./bases.js";
import { changeDraft, draft } from "./draft.js";

/** Page #/data. */
export class DataPage {
  title = "Data";

  constructor(app) {
    this.app = app;
    this.context = new PageContext([]);
    this.bases = new BaseChoice((base) => {
      changeDraft({ base, values: {}, name: "" });
      this.choose();
      this.load();
    });
    this.content = el("div", { "aria-live": "polite" });
    this.title = el("strong");
    this.choice = el("details", { class: "base-choice" }, el("summary", {}, "Config ", this.title),
      this.bases.element);
    this.again = el("button", { type: "button", onclick: () => this.load() }, "Read again");
    this.element = el("div", {}, el("div", { class: "page-head" }, el("h1", {}, "Data"),
      this.again), el("p", { class: "quiet" }, "What the config of “New run” reads, as it goes "
      + "into the model. The same on a terminal: ", el("code", {}, "samecurve data show -f FILE")),
    this.choice, this.content);
  }

  async start() {
    this.choose();
    try {
      await this.bases.load(draft().base);
      this.choose();
    } catch (error) {
      this.app.failed(error);
      return;
    }
    if (draft().base) await this.load();
  }

  stop() {
    this.abort?.abort();
    this.context.destroy();
  }

  choose() {
    const { base } = draft();
    this.choice.open = !base;
    this.again.hidden = !base;
    fill(this.title, this.bases.titleOf(base));
  }

  async load() {
    const { base, values } = draft();
    this.abort?.abort();
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.content.setAttribute("aria-busy", "true");
    this.content.classList.add("outdated");
    if (!this.content.childElementCount) {
      fill(this.content, el("p", { class: "quiet" }, "Reading the data …"));
    }
    try {
      const { blocks } = await write("/api/data", { base, values }, { signal });
      this.app.failed(null);
      this.draw(blocks);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.draw(error.errors.map(({ cause, remedy }) => {
        return { type: "text", tone: "bad", title: cause, text: remedy };
      }));
    }
  }

  draw(blocks) {
    this.content.removeAttribute("aria-busy");
    this.content.classList.remove("outdated");
    fill(this.content, renderBlocks(blocks, this.context));
    this.context.keepOnly(blocks);
  }
}
