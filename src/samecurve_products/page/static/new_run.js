/** Set up a run: what it begins from, the form, the plan beside it, and starting it. */

import { el, fill } from "/page/dom.js";
import { ApiError, write } from "./api.js";
import { BaseChoice } from "./bases.js";
import { doing, tell } from "./dialogs.js";
import { changeDraft, draft, keepValues, setValue } from "./draft.js";
import { FormField, fieldGroup } from "./fields.js";
import { multiGpuSection } from "./multi_gpu.js";
import { PlanPanel } from "./plan_panel.js";

const typingPause = 250; // milliseconds between the last key and the request for a plan
const reshaping = new Set(["task", "engine"]); // other fields depend on these

/** Page #/new. */
export class NewRunPage {
  title = "New run";

  constructor(app) {
    this.app = app;
    this.fields = new Map();
    this.plan = new PlanPanel();
    this.bases = new BaseChoice((base) => this.begin(base));
    this.form = el("form", { class: "run-form", onsubmit: (event) => event.preventDefault() });
    this.buttons = ["Save as YAML", "Queue", "Start"].map((label) => {
      return el("button", { type: "button", class: label === "Start" && "primary",
        onclick: (event) => this.send(label, event.currentTarget) }, label);
    });
    this.baseTitle = el("strong");
    this.notes = el("div");
    this.choice = el("details", { class: "base-choice", open: true },
      el("summary", {}, el("span", {}, "Begins from "), this.baseTitle), this.bases.element);
    this.work = el("div", { hidden: true },
      el("div", { class: "work" }, this.form, this.plan.element),
      el("div", { class: "start-bar" }, this.plan.brief, this.buttons));
    this.element = el("div", {}, el("div", { class: "page-head" }, el("h1", {}, "New run")),
      this.choice, this.notes, this.work);
  }

  async start() {
    try {
      await this.bases.load(draft().base);
      if (draft().base) await this.loadForm();
    } catch (error) {
      this.app.failed(error);
    }
  }

  stop() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.plan.destroy();
  }

  async begin(base) {
    changeDraft({ base, values: {}, name: "" });
    await this.loadForm();
    this.choice.firstElementChild.focus();
  }

  /** Ask for the form of the draft and draw it. */
  async loadForm() {
    const { base, values } = draft();
    const asked = this.asked = {};
    try {
      const [form, state] = await Promise.all([write("/api/form", { base, values }),
        this.app.state()]);
      if (this.asked !== asked) return; // a newer form is on its way
      this.app.failed(null);
      this.drawForm(form, state);
      this.work.hidden = false;
      this.choice.open = false;
      fill(this.baseTitle, form.title);
      fill(this.notes, (form.notes ?? []).map((note) => el("p", { class: "quiet" }, note)));
      this.request();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.app.failed(error);
    }
  }

  /** Draw a Form. A control shows what the draft has for it, else what the Form has. */
  drawForm({ groups, more, multi_gpu: multiGpu, values: begun, from = {}, name: named }, state) {
    const values = { ...begun, ...draft().values, name: draft().name };
    const changed = (key, value) => this.changed(key, value);
    const make = (field) => new FormField(field, values[field.key], changed, from[field.key]);
    const draw = (group) => {
      const fields = group.fields.map(make);
      for (const field of fields) this.fields.set(field.field.key, field);
      return fieldGroup(group, fields);
    };
    const wasOpen = this.more?.open ?? false;
    this.fields.clear();
    const multi = multiGpuSection(multiGpu, values, state, changed);
    for (const field of multi.fields) this.fields.set(field.field.key, field);
    const [first, ...basic] = groups.map(draw);
    const name = make({ key: "name", kind: "text", label: "Name", help: "", placeholder: named });
    this.fields.set("name", name);
    first.querySelector(".fields").prepend(name.element);
    this.more = el("details", { class: "more", open: wasOpen }, el("summary", {}, "More settings"),
      more.map(draw));
    this.more.hidden = !more.length;
    fill(this.form, first, multi.element, basic, this.more);
    keepValues((key) => this.fields.has(key)); // what is not shown is not sent
    this.showSections();
  }

  changed(key, value) {
    if (key === "name") changeDraft({ name: value });
    else setValue(key, value);
    if (key === "task") keepValues((other) => !/^(model|data)\./.test(other)); // of another task
    if (reshaping.has(key)) this.loadForm();
    else {
      this.showSections();
      this.later();
    }
  }

  /** Fields of a part of the config that is switched off are hidden. */
  showSections() {
    for (const { field, element } of this.fields.values()) {
      if (field.section && element) {
        element.hidden = !this.fields.get(field.section)?.value();
      }
    }
  }

  later() {
    clearTimeout(this.timer);
    this.plan.waiting();
    this.timer = setTimeout(() => this.request(), typingPause);
  }

  /** Ask for the plan of the draft; an older request is dropped. */
  async request() {
    this.abort?.abort();
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.plan.waiting();
    this.allow(false);
    try {
      const answer = await write("/api/plan", draft(), { signal });
      if (signal.aborted) return;
      this.showDefaults(answer.values);
      this.plan.show(answer, this.spread(answer.errors));
      this.allow(answer.ok);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      this.plan.fail({ errors: this.spread(error.errors) });
      this.allow(false);
    }
  }

  /** Controls that the user has not touched show what the plan has. values: of the plan. */
  showDefaults(values) {
    const own = draft().values;
    for (const field of this.fields.values()) {
      const { key } = field.field;
      if (key in values && !(key in own)) field.show(values[key]);
    }
    this.showSections();
  }

  /** Show errors beside their fields; returns those that no field takes. */
  spread(errors = []) {
    for (const field of this.fields.values()) {
      const own = errors.filter(({ key }) => key === field.field.key);
      const local = field.localError();
      field.showErrors(local ? [local] : own);
      if (own.length && this.more.contains(field.element)) this.more.open = true;
    }
    return errors.filter(({ key }) => !this.fields.has(key));
  }

  allow(ok) {
    for (const button of this.buttons) button.disabled = !ok;
  }

  async send(label, button) {
    const paths = { "Save as YAML": "/api/save", Queue: "/api/queue", Start: "/api/start" };
    const answer = await doing(button, () => write(paths[label], draft()));
    if (!answer) return;
    if (answer.path) tell(`Saved as ${answer.path}`);
    else {
      tell(label === "Start" ? `${answer.job.name} starts` : `${answer.job.name} is in the queue`);
      location.hash = label === "Start" ? `#/runs?follow=${answer.job.id}` : "#/runs";
    }
  }
}
