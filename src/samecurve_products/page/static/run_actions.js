/** What can be asked of a run now: stop, save, evaluate, sample, kill, resume. */

import { el, fill } from "/page/dom.js";
import { write } from "./api.js";
import { ask, doing, tell } from "./dialogs.js";
import { deviceChoice } from "./devices.js";

const labels = {
  stop: ["Stop", "Saves a checkpoint, then ends. The run can be resumed."],
  save: ["Save now", "Writes a checkpoint at the next step and goes on."],
  evaluate: ["Evaluate now", "Evaluates at the next step and goes on."],
  sample: ["Sample now", "Shows at the next step what the model makes, and goes on."],
  resume: ["Resume", "Goes on from the last checkpoint, on these or on other devices."],
  kill: ["Kill", "Ends the processes at once. Steps since the last checkpoint are lost."],
};

const ofEnded = {
  evaluate: ["Evaluate", "Evaluates the last checkpoint in a process of its own."],
  sample: ["Sample", "Shows what the model of the last checkpoint makes."],
};

/** The buttons of a run. `show(actions)` shows those that the run takes now. */
export class RunActions {
  /** done(): called after a request was taken. */
  constructor(app, path, done) {
    Object.assign(this, { app, path, done, name: "the run" });
    this.element = el("div", { class: "actions", tabindex: -1 });
  }

  /** actions: that the run takes now. devices: that it ran on last, as devices.use has them. */
  show(actions, live, devices) {
    this.devices = devices || "auto";
    const form = [live, ...actions].join();
    if (form === this.shown) return;
    this.shown = form;
    const order = Object.keys(labels).filter((action) => actions.includes(action));
    const hadFocus = this.element.contains(document.activeElement);
    fill(this.element, order.map((action) => {
      const [label, help] = (live ? null : ofEnded[action]) ?? labels[action];
      const tone = { stop: "primary", resume: "primary", kill: "danger-plain" }[action];
      return el("button", { type: "button", class: tone, title: help,
        onclick: (event) => this.act(action, event.currentTarget) }, label);
    }));
    if (hadFocus) this.element.focus({ preventScroll: true });
  }

  async act(action, button) {
    const questions = { kill: () => this.askKill(), resume: () => this.askResume() };
    const body = questions[action] ? await questions[action]() : {};
    if (body === null) return;
    const answer = await doing(button, () => write(`${this.path}/${action}`, body));
    if (answer) tell(answer.message ?? `${labels[action][0]}: asked`);
    this.done();
  }

  async askKill() {
    const answer = await ask({ title: `Kill ${this.name}?`, action: "Kill", tone: "bad",
      body: el("p", {}, `${labels.kill[1]} “Stop” saves first.`) });
    return answer && {};
  }

  async askResume() {
    const state = await doing(null, () => this.app.state());
    if (!state) return null;
    const choice = deviceChoice(state, this.devices);
    const strategy = el("select", { id: "resume-strategy" },
      el("option", { value: "" }, "as the config says"), ["auto", "single", "dp", "ddp", "fsdp",
        "hsdp"].map((name) => el("option", { value: name }, name)));
    const answer = await ask({ title: `Resume ${this.name}`, action: "Resume", body: [
      el("p", {}, "The run goes on from its last checkpoint. Its global batch stays as it began, "
        + "so the curve goes on whatever the devices."),
      choice.element,
      el("div", { class: "field" }, el("label", { for: "resume-strategy" }, "Strategy"), strategy),
    ] });
    if (!answer) return null;
    return { devices: choice.value(), ...(strategy.value && { strategy: strategy.value }) };
  }
}
