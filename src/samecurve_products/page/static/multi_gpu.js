/** The section Multi-GPU Training of the form. */

import { el, fill } from "/page/dom.js";
import { deviceChoice } from "./devices.js";
import { FormField } from "./fields.js";

/**
 * The section: {element, fields}.
 *
 * multiGpu: of the Form: {enabled, on, off, fields, statement, strategies}; `on` and `off` are
 * values of devices.use. values: what each control shows. changed(key, value): called at each change.
 */
export function multiGpuSection(multiGpu, values, state, changed) {
  const all = multiGpu.fields.filter(({ key }) => key !== "devices.use").map((field) => {
    const own = field.key === "devices.strategy" ? { ...field, help: "" } : field;
    return new FormField(own, values[field.key], (key, value) => {
      changed(key, value);
      explain();
    });
  });
  const find = (key) => all.find(({ field }) => field.key === key);
  const about = el("p", { class: "quiet" });
  const enable = el("input", { type: "checkbox", id: "multi-gpu",
    onchange: () => choose(enable.checked) });
  const devices = el("div");
  const problem = el("p", { class: "field-error", hidden: true, role: "alert" });
  const rest = el("div", { class: "fields" }, all.map(({ element }) => element),
    el("div", { class: "field list" },
      el("div", { class: "switch-row" }, el("span", { class: "good", "aria-hidden": "true" }, "✓"),
        el("strong", {}, "Distributed data")),
      el("p", { class: "quiet" }, multiGpu.statement)));
  find("devices.strategy")?.element.append(about);
  enable.checked = multiGpu.enabled;

  function draw(use) {
    const several = enable.checked;
    const choice = deviceChoice(state, use, { several, changed: (value) => {
      changed("devices.use", value);
    } });
    fill(devices, choice.element);
    rest.hidden = !several;
  }

  function choose(several) {
    const use = several ? multiGpu.on : multiGpu.off;
    draw(use);
    changed("devices.use", use);
  }

  /** Say what the chosen strategy does; the base batch is for a learning rate that is scaled. */
  function explain() {
    const row = multiGpu.strategies.find(({ value }) => {
      return value === find("devices.strategy")?.value();
    });
    fill(about, row ? `Holds ${row.holds}. Sends ${row.sends}. Suits ${row.suits}.` : "");
    const base = find("schedule.base_batch");
    if (base) base.element.hidden = find("schedule.scale_lr")?.value() === "none";
  }

  draw(values["devices.use"]);
  explain();
  const use = {
    field: { key: "devices.use" },
    localError: () => null,
    show() {}, // no default of devices.use follows from another value
    showErrors(errors) {
      problem.hidden = !errors.length;
      fill(problem, errors.map(({ cause, remedy }) => el("span", {}, cause,
        remedy && `: ${remedy}`)));
    },
  };
  const element = el("fieldset", { class: "group" }, el("legend", {}, "Multi-GPU Training"),
    el("div", { class: "field switch" }, el("div", { class: "switch-row" }, enable,
      el("label", { for: "multi-gpu" }, "Enable")),
    el("p", { class: "quiet" }, "Train on several devices. The loss curve stays the same.")),
    devices, problem, rest);
  return { element, fields: [...all, use] };
}
