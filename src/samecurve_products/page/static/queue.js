/** Jobs that wait for devices, in their order. */

import { el, fill } from "/page/dom.js";
import { formatMoment } from "/page/numbers.js";
import { write } from "./api.js";
import { ask, doing } from "./dialogs.js";
import { stateBadge } from "./states.js";

/** The section of the queue in the page of runs; it is hidden when no job is there. */
export class Queue {
  /** changed(): called when a job was moved or removed. */
  constructor(changed) {
    this.changed = changed;
    this.list = el("ol", { class: "jobs" });
    this.element = el("section", { hidden: true, "aria-label": "Queue" }, el("h2", {}, "Queue"),
      el("p", { class: "quiet" }, "Jobs run in this order, each as soon as the devices that it "
        + "asks for are free. They wait as files, so a restart of this server loses none."), this.list);
    this.isActive = false;
  }

  /** Show the jobs that wait, and those that the list of runs does not have. */
  show(jobs) {
    const text = JSON.stringify(jobs);
    if (text === this.before) return;
    this.before = text;
    const shown = jobs.filter(({ state, run_id: run }) => {
      return ["waiting", "foreign", "starting"].includes(state)
        || (!run && ["running", "failed"].includes(state));
    });
    this.isActive = jobs.some(({ state }) => ["waiting", "starting", "running"].includes(state));
    this.element.hidden = !shown.length;
    const focused = document.activeElement?.dataset?.job;
    fill(this.list, shown.map((job) => this.row(job, shown)));
    if (focused) this.list.querySelector(`[data-job="${CSS.escape(focused)}"]:enabled`)?.focus();
  }

  row(job, jobs) {
    const waiting = jobs.filter(({ state }) => state === "waiting");
    const place = waiting.indexOf(job);
    const running = job.state === "running" || job.state === "starting";
    const arrow = (name, sign, disabled) => el("button", { type: "button", class: "icon-button",
      disabled, "data-job": `${job.id} ${name}`, "aria-label": `Move ${job.name} ${name}`,
      title: `Move ${name}`, onclick: (event) => this.move(job, name, event.currentTarget) }, sign);
    return el("li", {},
      el("div", { class: "job-main" },
        job.run_id ? el("a", { href: `#/run/${job.run_id}` }, job.name)
          : el("strong", {}, job.name),
        stateBadge(job.state),
        el("span", { class: "quiet" }, [job.devices, job.started
          ? `started ${formatMoment(job.started)}` : `added ${formatMoment(job.added)}`]
          .filter(Boolean).join(" · ")),
        job.why && el("p", { class: "quiet" }, job.why),
        job.log_tail && el("details", { open: job.state === "failed" },
          el("summary", {}, "What it said last"), el("pre", { class: "wrap" }, job.log_tail)),
        el("details", {}, el("summary", {}, "Command"),
          el("pre", { class: "wrap" }, [job.command].flat().join(" ")))),
      el("div", { class: "job-buttons" },
        place >= 0 && [arrow("up", "↑", place === 0),
          arrow("down", "↓", place === waiting.length - 1)],
        !running && el("button", { type: "button", class: "plain",
          onclick: (event) => this.remove(job, event.currentTarget) }, "Remove")));
  }

  async move(job, direction, button) {
    await doing(button, () => write(`/api/queue/${job.id}/${direction}`));
    this.changed();
  }

  async remove(job, button) {
    const waits = job.state === "waiting";
    if (waits && !await ask({ title: `Remove ${job.name} from the queue?`,
      body: "It has not started. Its config stays where it was saved.", action: "Remove" })) return;
    await doing(button, () => write(`/api/queue/${job.id}`, {}, { method: "DELETE" }));
    this.changed();
  }
}
