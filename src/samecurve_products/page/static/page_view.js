/** A page that the server made as blocks: asked for once, drawn once. */

import { RunColumns } from "/page/arrays.js";
import { PageContext, renderBlocks } from "/page/blocks.js";
import { el, fill } from "/page/dom.js";
import { read } from "./api.js";

/** Shows the Page of an address. */
export class PageView {
  constructor(app, path) {
    this.app = app;
    this.path = path;
    this.content = el("div", { "aria-busy": "true" }, el("p", { class: "quiet" }, "Reading …"));
    this.element = el("div", {}, this.content);
  }

  async start() {
    this.abort = new AbortController();
    try {
      this.draw(await read(this.path, { signal: this.abort.signal }));
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(this.content);
      this.app.failed(error);
    } finally {
      this.content.removeAttribute("aria-busy");
    }
  }

  stop() {
    this.abort?.abort();
    this.context?.destroy();
  }

  draw(page) {
    const runs = (page.runs ?? []).map(({ name, colour, columns }) => {
      const run = new RunColumns(name, colour);
      run.update(columns);
      return run;
    });
    this.context?.destroy();
    this.context = new PageContext(runs);
    fill(this.content, renderBlocks(this.shownBlocks(page.blocks), this.context));
  }

  /** The blocks that are drawn; a page with a head of its own leaves some out. */
  shownBlocks(blocks) {
    return blocks;
  }
}
