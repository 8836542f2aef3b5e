/** States of runs and jobs: their words, colours, and how their rows are worded. */

import { badge } from "/page/blocks.js";
import { el } from "/page/dom.js";
import { formatCount, formatDigits, formatInteger } from "/page/numbers.js";

const tones = {
  running: "accent", starting: "accent", finished: "good", failed: "bad", stopped: "quiet",
  interrupted: "warn", waiting: "quiet", foreign: "warn", queued: "quiet", "not started": "bad",
};

/** The badge of a state. */
export function stateBadge(state) {
  const mark = badge({ text: state, tone: tones[state] ?? "quiet" });
  mark.classList.toggle("alive", isLive(state));
  return mark;
}

/** Whether a run in this state still changes. */
export function isLive(state) {
  return state === "running" || state === "starting";
}

/** "1,200 of 5,000", with how much of it is done: {text, share: 0..1 or null}. */
export function progress({ step, steps }) {
  if (step === null || step === undefined) return { text: "–", share: null };
  if (!steps) return { text: formatInteger(step), share: null };
  return { text: `${formatInteger(step)} of ${formatInteger(steps)}`, share: step / steps };
}

/** A loss with five digits. */
export function lossText(loss) {
  return loss === null || loss === undefined ? "–" : formatDigits(loss, 5);
}

/** {value, unit} -> "160k tokens/s". */
export function rateText(rate) {
  return rate ? `${formatCount(rate.value)} ${rate.unit}` : "–";
}

/** A thin bar of how much is done. */
export function progressBar(share) {
  return el("span", { class: "progress", "aria-hidden": "true" },
    el("span", { style: { width: `${100 * Math.min(1, share)}%` } }));
}
