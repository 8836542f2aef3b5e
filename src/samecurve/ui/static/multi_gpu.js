/** The section Multi-GPU Training of the form. */

import { el, fill } from "/page/dom.js";
import { deviceChoice } from "./devices.js";
import { FormField } from "./fields.js";

const statement = "Data is always distributed: each device reads only its own samples of a step. "
  + "Every sample is used exactly once an epoch, whatever the number of devices, so there is no "
  + "switch for it.";

/**
 * The section: {element, fields}.
 *
 * multiGpu: of the Form, {fields, statement?}. values: of the Form. changed(key, value).
 */
export function multiGpuSection(multiGpu, values, state, changed) {
  const fields = (multiGpu.fields ?? [])
    .filter(({ key }) => key !== "devices.use")
    .map((field) => new FormField(field, values[field.key] ?? field.default, (key, value) => {
      changed(key, value);
      showBaseBatch();
    }));
  const use = String(values["devices.use"] ?? "auto");
  const gpus = state.devices.filter(({ kind }) => kind !== "cpu").length;
  const enable = el("input", { type: "checkbox", id: "multi-gpu",
    onchange: () => choose(enable.checked) });
  enable.checked = isSeveral(use, gpus);
  const problem = el("p", { class: "field-error", id: "devices-error", hidden: true });
  const devices = el("div");
  const rest = el("div", { class: "fields" });
  let choice = null;

  function draw(current) {
    const several = enable.checked;
    choice = deviceChoice(state, current, { several, changed: (value) => {
      changed("devices.use", value);
    } });
    fill(devices, choice.element, problem);
    rest.hidden = !several;
  }

  /** The base batch has a meaning only where the learning rate is scaled. */
  function showBaseBatch() {
    const find = (key) => fields.find(({ field }) => field.key === key);
    const scaled = find("schedule.scale_lr")?.value() !== "none";
    const base = find("schedule.base_batch");
    if (base) base.element.hidden = !scaled;
  }

  function choose(several) {
    draw(several && gpus < 2 ? "cpu:2" : "all");
    changed("devices.use", choice.value());
  }

  fill(rest, fields.map(({ element }) => element), el("div", { class: "field list" },
    el("div", { class: "switch-row" }, el("span", { class: "good", "aria-hidden": "true" }, "✓"),
      el("strong", {}, "Distributed data")),
    el("p", { class: "quiet" }, multiGpu.statement ?? statement)));
  draw(use);
  showBaseBatch();
  const devicesField = {
    field: { key: "devices.use" },
    showErrors(errors) {
      problem.hidden = !errors.length;
      fill(problem, errors.map(({ cause, remedy }) => `${cause}${remedy ? `: ${remedy}` : ""}`));
    },
    localError: () => null,
  };
  const element = el("fieldset", { class: "group" }, el("legend", {}, "Multi-GPU Training"),
    el("div", { class: "field switch" }, el("div", { class: "switch-row" }, enable,
      el("label", { for: "multi-gpu" }, "Enable")),
    el("p", { class: "quiet" }, "Train on several devices. The loss curve stays the same.")),
    devices, rest);
  return { element, fields: [...fields, devicesField] };
}

function isSeveral(use, gpus) {
  if (use === "auto" || use === "all") return gpus > 1;
  return use.startsWith("cpu:") ? Number(use.slice(4)) > 1 : use.includes(",");
}
