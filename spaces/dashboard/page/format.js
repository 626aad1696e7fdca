// Numbers and times as text.

const UNITS = ["", "k", "M", "G", "T", "P", "E"];

export function count(value) {
  if (value === null || value === undefined) return "unknown";
  let scaled = value;
  let unit = 0;
  while (Math.abs(scaled) >= 999.5 && unit < UNITS.length - 1) {
    scaled /= 1000;
    unit += 1;
  }
  if (unit === 0) return String(Math.round(scaled * 100) / 100);
  return `${scaled.toPrecision(3)} ${UNITS[unit]}`;
}

export function bytes(value) {
  const text = count(value);
  return text.includes(" ") ? `${text}B` : `${text} B`;
}

export function percent(share) {
  if (share === 0 || share === 1) return `${share * 100} %`;
  return share < 1e-4 ? "<0.01 %" : `${(share * 100).toFixed(2)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  if (whole < 172800) return `${Math.round(whole / 3600)} h`;
  return `${Math.round(whole / 86400)} days`;
}

/** A time that may be far below a second. */
export function precise(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return "<1 ms";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 99.5 ? `${seconds.toPrecision(3)} s` : duration(seconds);
}

export function moment(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  const date = new Date(seconds * 1000);
  if (Number.isNaN(date.getTime())) return "unknown";
  return date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

export function plural(number, one, many = `${one}s`) {
  return `${number.toLocaleString()} ${number === 1 ? one : many}`;
}
