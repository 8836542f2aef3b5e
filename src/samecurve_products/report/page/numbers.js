/** Numbers as text: units, thousands separators, six digits at most. */

const byteUnits = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const countUnits = ["", "k", "M", "G", "T", "P"];
const timeUnits = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const units = { watts: " W", celsius: " °C" };

/** 1234567 -> "1,234,567". */
export function formatInteger(value) {
  return Math.round(value).toLocaleString("en-US");
}

/** Six significant digits without trailing zeros: 1234.5678 -> "1,234.57"; 0.00001 -> "1e-5". */
export function formatDigits(value, digits = 6) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-4) {
    const [mantissa, power] = value.toExponential(digits - 1).split("e");
    return `${Number(mantissa)}e${Number(power)}`;
  }
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

/** 1536 -> "1.5 KiB". */
export function formatBytes(value) {
  const unit = tickUnit("bytes", value);
  const count = value / unit.size;
  return `${unit.size === 1 ? Math.round(count) : count.toFixed(1)} ${unit.name}`;
}

/** 99999 -> "99,999"; 1234567 -> "1.23M". */
export function formatCount(value) {
  if (Math.abs(value) < 1) return formatDigits(value, 3);
  if (Math.abs(value) < 1e5) return formatDigits(value, 5);
  const power = Math.min(Math.floor(Math.log10(Math.abs(value)) / 3), countUnits.length - 1);
  return formatDigits(value / 1000 ** power, 3) + countUnits[power];
}

/** 0.0083 -> "8.3 ms"; 75 -> "1 min 15 s"; 3725 -> "1 h 02 min"; 90000 -> "1 d 01 h". */
export function formatSeconds(value) {
  if (value < 0) return `-${formatSeconds(-value)}`;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${formatDigits(value * 1e6, 3)} µs`;
  if (value < 0.9995) return `${formatDigits(value * 1e3, 3)} ms`;
  if (value < 59.95) return `${formatDigits(value, 3)} s`;
  const whole = Math.round(value);
  const larger = timeUnits.findIndex(([size]) => whole >= size);
  const [size, name] = timeUnits[larger];
  const [smallerSize, smaller] = timeUnits[larger + 1];
  const rest = Math.floor((whole % size) / smallerSize);
  return `${formatInteger(Math.floor(whole / size))} ${name} ${pad(rest)} ${smaller}`;
}

/** Seconds since 1970 as the reader's local time: "24 Nov 09:05", with the year of another year. */
export function formatMoment(seconds, now = new Date()) {
  const date = new Date(seconds * 1000);
  if (Number.isNaN(date.getTime())) return "";
  const year = date.getFullYear() === now.getFullYear() ? undefined : "numeric";
  const day = date.toLocaleDateString("en-GB", { day: "numeric", month: "short", year });
  return `${day} ${pad(date.getHours())}:${pad(date.getMinutes())}`;
}

/**
 * A value as text.
 * format: number, integer, percent (0..1), percent100, bytes, seconds, count, lr, watts, celsius.
 */
export function formatValue(value, format) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  switch (format) {
    case "integer": return formatInteger(value);
    case "percent": return `${formatDigits(value * 100, 3)} %`;
    case "percent100": return `${formatDigits(value, 3)} %`;
    case "bytes": return formatBytes(value);
    case "seconds": return formatSeconds(value);
    case "count": return formatCount(value);
    case "lr": return formatDigits(value, 3);
    case "watts":
    case "celsius": return formatDigits(value, 3) + units[format];
    default: return formatDigits(value);
  }
}

/** The unit in which an axis is labelled whose largest value is `largest`: {size, name}. */
export function tickUnit(format, largest) {
  const size = Math.abs(largest);
  if (format === "bytes") {
    const power = size < 1 ? 0 : Math.floor(Math.log2(size) / 10 + 1e-9);
    const most = Math.min(power, byteUnits.length - 1);
    return { size: 1024 ** most, name: byteUnits[most] };
  }
  if (format === "seconds") {
    const [seconds, name] = timeUnits.find(([unit]) => size >= 2 * unit) ?? [1, "s"];
    return size < 1 && size > 0 ? { size: 1e-3, name: "ms" } : { size: seconds, name };
  }
  if (format === "percent") return { size: 0.01, name: "%" };
  if (format === "percent100") return { size: 1, name: "%" };
  if (format === "count" && size >= 1e4) {
    const power = Math.min(Math.floor(Math.log10(size) / 3), countUnits.length - 1);
    return { size: 1000 ** power, name: countUnits[power] };
  }
  return { size: 1, name: (units[format] ?? "").trim() };
}

/** The text of one tick of an axis, in the axis' unit. */
export function formatTick(value, format, unit) {
  const count = value / unit.size;
  if (!unit.name || value === 0) return formatDigits(count);
  return formatDigits(count, 4) + (format === "count" ? "" : " ") + unit.name;
}

/** Round numbers (1, 2, 5 times a power of ten, times `unit`) between two limits. */
export function roundTicks(low, high, most, unit = 1) {
  const raw = (high - low) / Math.max(most, 1) / unit;
  if (!(raw > 0) || !Number.isFinite(raw)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) * power * unit;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) {
    ticks.push(Number((i * step).toPrecision(12)));
  }
  return ticks;
}

/** Ticks of a logarithmic axis: powers of ten with 2 and 5 between, or round numbers. */
export function logTicks(low, high, most) {
  const decades = Math.log10(high / low);
  if (decades < 1) return roundTicks(low, high, most);
  const factors = decades * 3 <= most ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((decades + 1) / Math.max(most, 1)));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    if (power % every !== 0) continue;
    for (const factor of factors) {
      const tick = Number(`${factor}e${power}`);
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

function pad(number) {
  return String(number).padStart(2, "0");
}
