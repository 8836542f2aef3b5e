/** The lines of a chart as the table of columns that uPlot draws. */

import { RunColumns, decodeArray, extremes, nearestIndex, smoothed } from "./arrays.js";

/**
 * One line with its numbers on the chosen x axis.
 *
 * {line, x, y, low, high, errors}: x rises; low and high are absent where each point is one step.
 */
export function lineNumbers(line, runs, kind) {
  const run = runs[line.run ?? 0] ?? new RunColumns("");
  if (line.column === undefined) return { line, ...drawnNumbers(line, run, kind) };
  const many = run.stepsPerPoint > 1;
  const x = run.get(kind) ?? new Float64Array(0);
  const missing = () => new Float64Array(x.length).fill(NaN);
  return {
    line,
    x,
    y: run.get(line.column) ?? missing(),
    low: many ? run.get(`${line.column}/low`) : undefined,
    high: many ? run.get(`${line.column}/high`) : undefined,
  };
}

/**
 * What uPlot needs: {data, series, bands}.
 *
 * series: [{part: "low" | "high" | "raw" | "main", index}], in uPlot's order after x.
 * settings: {smooth: 0..1, log: bool}. Only columns of runs are made smooth.
 */
export function chartTable(lines, settings) {
  const tables = [];
  const series = [];
  const bands = [];
  lines.forEach((numbers, index) => {
    const parts = lineParts(numbers, numbers.line.column ? settings.smooth : 0);
    const first = series.length + 1;
    for (const part of parts) series.push({ part: part.name, index });
    if (parts[0].name === "low") bands.push({ series: [first + 1, first], index });
    const columns = parts.map(({ values }) => withGaps(values, settings.log));
    tables.push([Array.from(numbers.x), ...columns]);
  });
  return { data: joinTables(tables), series, bands };
}

/** The value of a line where the cursor is, or its last one: {x, y} or null. */
export function valueAt({ x, y }, wanted) {
  if (!x.length) return null;
  if (wanted !== null) {
    const index = nearestIndex(x, wanted);
    return { x: x[index], y: y[index] };
  }
  const found = extremes(y);
  return found && { x: x[found.last], y: y[found.last] };
}

function drawnNumbers(line, run, kind) {
  const x = decodeArray(line.x ?? []);
  const decode = (array) => array && decodeArray(array);
  return {
    x: kind === "own" ? x : run.toAxis(x, kind),
    y: decode(line.y) ?? new Float64Array(x.length).fill(NaN),
    low: decode(line.low),
    high: decode(line.high),
    errors: line.errors?.map(decodeArray),
  };
}

function lineParts({ y, low, high }, weight) {
  const parts = [];
  if (low && high) parts.push({ name: "low", values: low }, { name: "high", values: high });
  if (weight > 0) parts.push({ name: "raw", values: y });
  parts.push({ name: "main", values: weight > 0 ? smoothed(y, weight) : y });
  return parts;
}

/** uPlot's form: null is a gap. A logarithmic axis has no place for zero and below. */
function withGaps(numbers, log) {
  return Array.from(numbers, (value) => {
    return Number.isFinite(value) && !(log && value <= 0) ? value : null;
  });
}

function joinTables(tables) {
  if (!tables.length) return [[]];
  const [first] = tables[0];
  if (tables.every(([x]) => x.length === first.length && x.every((v, i) => v === first[i]))) {
    return [first, ...tables.flatMap(([, ...columns]) => columns)];
  }
  return uPlot.join(tables);
}
