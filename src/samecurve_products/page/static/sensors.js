/** What each device does now: utilisation, memory, power, temperature. */

import { el, fill } from "/page/dom.js";
import { formatBytes, formatValue } from "/page/numbers.js";

const hottest = 100; // °C, the end of a temperature's bar

/** Small bars of each device; texts and widths change in place. */
export class SensorsPanel {
  constructor() {
    this.list = el("div", { class: "sensors" });
    this.none = el("p", { class: "quiet" }, "No device has told its sensors yet. Sensors are read "
      + "every few seconds while the run goes on (track.sensors_every).");
    this.element = el("div", {}, this.none, this.list);
  }

  show(devices) {
    this.none.hidden = devices.length > 0;
    const form = JSON.stringify(devices.map((device) => [device.name, metersOf(device)
      .map(({ label }) => label)]));
    if (form !== this.form) {
      this.form = form;
      this.meters = devices.map((device) => metersOf(device).map(({ label }) => newMeter(label)));
      fill(this.list, devices.map(({ name }, index) => el("div", { class: "sensor" },
        el("h3", {}, name), this.meters[index].map(({ element }) => element))));
    }
    devices.forEach((device, index) => {
      metersOf(device).forEach(({ share, text }, at) => {
        const meter = this.meters[index][at];
        fill(meter.text, text);
        meter.bar.hidden = share === null;
        meter.fill.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
      });
    });
  }
}

function metersOf(device) {
  const { utilisation, memory_bytes: memory, memory_total: total, power_watts: power } = device;
  const { celsius } = device;
  const known = (value) => value !== null && value !== undefined;
  return [
    known(utilisation) && { label: "Utilisation", share: utilisation,
      text: formatValue(utilisation, "percent") },
    known(memory) && { label: "Memory", share: total ? memory / total : null,
      text: total ? `${formatBytes(memory)} of ${formatBytes(total)}` : formatBytes(memory) },
    known(power) && { label: "Power", share: null, text: formatValue(power, "watts") },
    known(celsius) && { label: "Temperature", share: celsius / hottest,
      text: formatValue(celsius, "celsius") },
  ].filter(Boolean);
}

function newMeter(label) {
  const text = el("span", { class: "meter-text" });
  const part = el("span");
  const bar = el("span", { class: "progress", "aria-hidden": "true" }, part);
  const element = el("div", { class: "meter" }, el("span", { class: "quiet" }, label),
    text, bar);
  return { element, text, bar, fill: part };
}
