/** The logs of a run: one file a rank, searched on the server, older lines on demand. */

import { el, fill } from "/page/dom.js";
import { Poller, read } from "./api.js";

const typingPause = 250; // milliseconds

/** A panel of log lines. It asks only while it is shown. */
export class LogsPanel {
  constructor(path, failed) {
    this.path = path;
    this.isLive = false;
    this.file = "";
    this.older = [];
    this.poller = new Poller((signal) => this.load(signal), failed);
    this.build();
  }

  start() {
    if (!this.poller.running) this.poller.start();
  }

  stop() {
    this.poller.stop();
  }

  build() {
    this.files = el("select", { "aria-label": "Log of", onchange: () => this.again() });
    this.search = el("input", { type: "search", placeholder: "Search", "aria-label": "Search logs",
      oninput: () => {
        clearTimeout(this.typing);
        this.typing = setTimeout(() => this.again(), typingPause);
      } });
    this.more = el("button", { type: "button", hidden: true, onclick: () => this.loadOlder() },
      "Older");
    this.newest = el("button", { type: "button", hidden: true, onclick: () => this.again() },
      "Back to the newest");
    this.lines = el("pre", { class: "log wrap", tabindex: 0, "aria-label": "Log lines" });
    this.element = el("div", {}, el("div", { class: "toolbar" }, this.files, this.search, this.more,
      this.newest), this.lines);
  }

  /** Show the newest lines of the chosen file. */
  again() {
    this.older = [];
    this.before = null;
    this.poller.stop();
    this.poller.start();
  }

  query(before) {
    const query = new URLSearchParams();
    if (this.files.value) query.set("file", this.files.value);
    if (this.search.value) query.set("search", this.search.value);
    if (before !== undefined) query.set("before", before);
    return `${this.path}/logs?${query}`;
  }

  async load(signal) {
    if (this.older.length) return 60000;
    const answer = await read(this.query(), { signal });
    this.offer(answer.files);
    const text = JSON.stringify(answer.lines);
    if (text !== this.before) {
      this.before = text;
      const atEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 40;
      this.show(answer);
      if (atEnd) this.lines.scrollTop = this.lines.scrollHeight;
    }
    return this.isLive ? 2000 : 10000;
  }

  async loadOlder() {
    try {
      const answer = await read(this.query(this.from));
      this.older = [...answer.lines, ...(this.older.length ? this.older : this.newestLines)];
      const height = this.lines.scrollHeight - this.lines.scrollTop;
      this.show({ ...answer, lines: this.older });
      this.lines.scrollTop = this.lines.scrollHeight - height;
    } catch (error) {
      this.poller.failed(error);
    }
  }

  show({ lines, start, more }) {
    this.newestLines = lines;
    this.from = start;
    this.more.hidden = !more;
    this.newest.hidden = !this.older.length;
    const words = this.search.value.toLowerCase();
    const empty = words ? "No line has these words." : "Nothing has been written yet.";
    if (!lines.length) fill(this.lines, el("span", { class: "quiet" }, empty));
    else fill(this.lines, lines.map((line) => el("div", {}, words ? found(line, words) : line)));
  }

  offer(files) {
    if (files.join() === this.offered) return;
    this.offered = files.join();
    const { value } = this.files;
    fill(this.files, files.map((file) => el("option", { value: file }, file)));
    if (files.includes(value)) this.files.value = value;
  }
}

/** A line whose found words are marked. */
function found(line, words) {
  const parts = [];
  const lower = line.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, from)) {
    parts.push(line.slice(from, at), el("mark", {}, line.slice(at, at + words.length)));
    from = at + words.length;
  }
  return [...parts, line.slice(from)];
}
