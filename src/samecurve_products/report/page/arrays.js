/**
 * The numbers of runs: decoded once, extended as a live run goes on.
 *
 * Invariant: the columns of one run have one length, and `step` rises.
 */

const axisLabels = {
  step: "Step", samples: "Samples", tokens: "Tokens", seconds: "Time", wall: "Wall time",
};
const axisFormats = {
  step: "integer", samples: "count", tokens: "count", seconds: "seconds", wall: "seconds",
};

/** What an x axis of this kind is called. */
export function axisLabel(kind) {
  return axisLabels[kind] ?? kind;
}

/** The format of an x axis of this kind. */
export function axisFormat(kind) {
  return axisFormats[kind] ?? "number";
}

/** An Array of a page as numbers; a gap is NaN. */
export function decodeArray(array) {
  if (Array.isArray(array)) return Float64Array.from(array, (value) => value ?? NaN);
  const bytes = Uint8Array.from(atob(array.f64 ?? array.f32), (letter) => letter.charCodeAt(0));
  const numbers = array.f64 === undefined ? Float32Array : Float64Array;
  return new numbers(bytes.buffer);
}

/** The columns of one run. */
export class RunColumns {
  constructor(name, colour = 0) {
    this.name = name;
    this.colour = colour;
    this.generation = null;
    this.count = 0;
    this.stepsPerPoint = 1;
    this.columns = new Map();
  }

  /**
   * Take what the server sent: all points, or those from `start` on.
   * Returns whether anything changed.
   */
  update({ generation, start, count, steps_per_point: stepsPerPoint, arrays }) {
    const sent = Object.entries(arrays);
    const kept = generation === this.generation ? start : 0;
    if (generation === this.generation && !sent.length && count === this.count) return false;
    const columns = new Map();
    const total = kept + (sent.length ? decodeArray(sent[0][1]).length : 0);
    for (const [name, array] of sent) {
      columns.set(name, joined(this.columns.get(name), decodeArray(array), kept));
    }
    for (const [name, numbers] of kept ? this.columns : []) {
      if (!columns.has(name)) columns.set(name, joined(numbers, new Float64Array(0), kept, total));
    }
    Object.assign(this, { generation, count: total, stepsPerPoint, columns });
    return true;
  }

  get(name) {
    return this.columns.get(name);
  }

  /** The kinds of x axis that this run's columns allow. */
  axes() {
    return Object.keys(axisLabels).filter((kind) => this.columns.has(kind));
  }

  /** Where steps lie on an axis, by interpolation; after the last point: that point. */
  toAxis(steps, kind) {
    const from = this.columns.get("step");
    const to = this.columns.get(kind);
    if (kind === "step" || !from?.length || !to) return steps;
    return Float64Array.from(steps, (step) => interpolate(step, from, to));
  }
}

/** The index of the number nearest to `wanted` in rising `numbers`. */
export function nearestIndex(numbers, wanted) {
  const next = firstAtLeast(numbers, wanted);
  if (next === 0) return 0;
  if (next === numbers.length) return next - 1;
  return wanted - numbers[next - 1] <= numbers[next] - wanted ? next - 1 : next;
}

/**
 * A running mean that weighs the last point most; the start is not pulled towards zero.
 * weight: 0 (the numbers themselves) to below 1.
 */
export function smoothed(numbers, weight) {
  let mean = 0;
  let share = 0;
  return Float64Array.from(numbers, (value) => {
    if (Number.isNaN(value)) return NaN;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

/** {first, last, lowest, highest} of the finite numbers as indices, or null if there is none. */
export function extremes(numbers) {
  let found = null;
  for (let i = 0; i < numbers.length; i += 1) {
    if (!Number.isFinite(numbers[i])) continue;
    found ??= { first: i, last: i, lowest: i, highest: i };
    found.last = i;
    if (numbers[i] < numbers[found.lowest]) found.lowest = i;
    if (numbers[i] > numbers[found.highest]) found.highest = i;
  }
  return found;
}

function joined(old, added, kept, length = kept + added.length) {
  const all = new Float64Array(length).fill(NaN);
  if (old) all.set(old.subarray(0, kept));
  all.set(added, kept);
  return all;
}

function interpolate(step, from, to) {
  const next = firstAtLeast(from, step);
  if (next === from.length) return to[next - 1];
  const [before, start] = next === 0 ? [0, 0] : [from[next - 1], to[next - 1]];
  const gap = from[next] - before;
  return gap > 0 ? start + ((step - before) / gap) * (to[next] - start) : to[next];
}

function firstAtLeast(numbers, wanted) {
  let low = 0;
  let high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}
