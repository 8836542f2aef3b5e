/** Parts of a chart that are drawn on uPlot's canvas: axes, marks of events, error bars. */

import { themeColour } from "./dom.js";
import { formatTick, logTicks, roundTicks, tickUnit } from "./numbers.js";

const markTones = {
  resumed: "accent", warned: "warn", failed: "bad", slow: "warn", skipped: "warn",
  stopped: "quiet", finished: "good",
};

/** Dashed lines at events of a run, with their kind as a label where there is room. */
export function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  const right = bbox.left + bbox.width;
  let free = bbox.left;
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  ctx.lineWidth = ratio;
  for (const { x, kind, label } of joinedMarks(marks)) {
    const left = plot.valToPos(x, "x", true);
    if (!(left >= bbox.left && left <= right)) continue;
    ctx.strokeStyle = ctx.fillStyle = themeColour(markTones[kind] ?? "quiet");
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    line(ctx, left, bbox.top, left, bbox.top + bbox.height);
    const width = ctx.measureText(label).width + 4 * ratio;
    const start = left + width > right ? left - width : left + 4 * ratio;
    if (start < free) continue;
    ctx.fillText(label, start, bbox.top + 10 * ratio);
    free = start + width + 4 * ratio;
  }
  ctx.restore();
}

/** Marks from left to right; those of one place are one: "stopped, resumed". */
function joinedMarks(marks) {
  const places = new Map();
  for (const { x, kind } of [...marks].sort((a, b) => a.x - b.x)) {
    const before = places.get(x)?.label.split(", ") ?? [];
    places.set(x, { x, kind, label: [...new Set([...before, kind])].join(", ") });
  }
  return places.values();
}

/** Error bars. lines: [{x, errors: [lowest values, highest values], index}]. */
export function drawErrors(plot, lines, colour) {
  const { ctx } = plot;
  const half = 4 * devicePixelRatio;
  ctx.save();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  for (const { x, errors, index } of lines) {
    ctx.strokeStyle = colour(index);
    x.forEach((value, i) => {
      const left = plot.valToPos(value, "x", true);
      const [low, high] = errors.map((limits) => plot.valToPos(limits[i], "y", true));
      line(ctx, left, low, left, high);
      for (const end of [low, high]) line(ctx, left - half, end, left + half, end);
    });
  }
  ctx.restore();
}

/**
 * An axis of uPlot with round ticks in the format's unit.
 * space: pixels between ticks, at least. ticks: fixed ones. Other options are uPlot's.
 */
export function plotAxis({ format, ticks, log, space, ...options }) {
  const unit = (plot, index) => {
    const { min, max } = plot.scales[index === 0 ? "x" : "y"];
    return tickUnit(format, Math.max(Math.abs(min), Math.abs(max)));
  };
  return {
    stroke: () => themeColour("quiet"),
    grid: { stroke: () => themeColour("line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    labelFont: "11px system-ui, sans-serif",
    labelGap: 0,
    gap: 6,
    splits: (plot, index, low, high) => {
      if (ticks) return ticks.filter((tick) => tick >= low && tick <= high);
      const most = Math.max(2, Math.floor((index === 0 ? plot.width : plot.height - 60) / space));
      return log ? logTicks(low, high, most) : roundTicks(low, high, most, unit(plot, index).size);
    },
    values: (plot, splits, index) => {
      return splits.map((value) => formatTick(value, format, unit(plot, index)));
    },
    filter: (plot, splits) => splits,
    ...options,
  };
}

/** The width of a y axis with these texts, in pixels. */
export function plotAxisWidth(plot, texts) {
  const longest = Math.max(0, ...(texts ?? []).map((text) => text.length));
  return Math.max(44, Math.ceil(longest * 6.4) + 14);
}

function line(ctx, x0, y0, x1, y1) {
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}
