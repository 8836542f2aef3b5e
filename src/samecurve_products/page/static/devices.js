/** Which devices a run uses: check boxes of those that were detected, or a number of CPU ranks. */

import { el } from "/page/dom.js";
import { formatBytes, formatValue } from "/page/numbers.js";

/**
 * A choice of devices: {element, value()}.
 *
 * state: the answer of /api/state. use: `devices.use` of a config (auto, all, cpu, cpu:4, "0,1").
 * several: more than one device may be chosen. changed(value): called at each change.
 */
export function deviceChoice(state, use, { several = true, changed = () => {} } = {}) {
  const gpus = state.devices.filter(({ kind }) => kind !== "cpu");
  const chosen = chosenDevices(gpus, String(use), several);
  const onchange = () => changed(value());
  const boxes = gpus.map((gpu) => el("input", { type: several ? "checkbox" : "radio",
    name: "devices", value: gpu.index, checked: chosen.indices.has(gpu.index), onchange }));
  const cpu = el("input", { type: several ? "checkbox" : "radio", name: "devices", value: "cpu",
    checked: chosen.ranks > 0, onchange });
  const ranks = el("input", { type: "number", min: 1, max: 64, value: Math.max(1, chosen.ranks),
    "aria-label": "CPU ranks", title: "Processes that act as devices", oninput: onchange,
    onchange: () => { ranks.value = numRanks(); } });
  const rankPart = el("span", { class: "ranks" }, "as", ranks, "ranks");
  cpu.addEventListener("change", () => choose(cpu.checked ? boxes : []), { capture: true });
  for (const box of boxes) {
    box.addEventListener("change", () => choose(box.checked ? [cpu] : []), { capture: true });
  }
  if (!gpus.length) cpu.checked = true;
  choose([]);

  /** GPUs and the CPU are never used together. */
  function choose(others) {
    for (const box of others) box.checked = false;
    rankPart.hidden = !several || !cpu.checked;
  }

  /** The ranks that are asked for; a number that can't be one is the nearest that can. */
  function numRanks() {
    return Math.max(1, Math.round(Number(ranks.value)) || 1);
  }

  function value() {
    const indices = boxes.filter(({ checked }) => checked).map((box) => box.value);
    if (indices.length) return indices.join(",");
    const count = several ? numRanks() : 1;
    return count === 1 ? "cpu" : `cpu:${count}`;
  }

  const about = [state.cpu, `${state.cores} cores`].filter(Boolean).join(", ");
  const element = el("fieldset", { class: "devices" }, el("legend", {}, "Devices"),
    el("p", { class: "quiet" }, state.detected),
    gpus.map((gpu, index) => el("label", { class: "device" }, boxes[index],
      el("span", {}, `${gpu.index}: ${gpu.name}`, el("small", {}, deviceUse(gpu))))),
    el("div", { class: "device" }, el("label", { class: "device" },
      gpus.length > 0 && cpu, el("span", {}, "CPU", el("small", {}, about))), rankPart));
  return { element, value };
}

function chosenDevices(gpus, use, several) {
  const all = gpus.map(({ index }) => index);
  if (use.startsWith("cpu")) {
    const [, ranks = 1] = use.split(":");
    return { indices: new Set(), ranks: Number(ranks) };
  }
  if (use === "auto" || use === "all") {
    const indices = new Set(several ? all : all.slice(0, 1));
    return { indices, ranks: indices.size ? 0 : 1 };
  }
  return { indices: new Set(use.split(",").map(Number)), ranks: 0 };
}

function deviceUse({ memory, used, utilisation }) {
  const parts = [];
  if (memory) parts.push(`${formatBytes(used ?? 0)} of ${formatBytes(memory)} in use`);
  if (utilisation !== null && utilisation !== undefined) {
    parts.push(`${formatValue(utilisation, "percent")} busy`);
  }
  return parts.join(", ");
}
