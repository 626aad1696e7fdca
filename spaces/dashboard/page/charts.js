// Charts, by uPlot. Colours are those of the style sheet, in the light and the dark one.

import uPlot from "./uPlot.esm.js";
import { bytes, precise } from "./format.js";

const HEIGHT = 230;
const COLOURS = { selected: "blue", bad: "red", warn: "amber", good: "faint" }; // of replicas, by state

const palette = new Map(); // of the style sheet in use: a chart of many lines asks often
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => palette.clear());

function colour(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return palette.get(name);
}

const WHOLE = [1, 2, 5].flatMap((step) => Array.from({ length: 16 }, (_, power) => step * 10 ** power)).sort((a, b) => a - b);

const isDecade = (value) => Math.abs(Math.log10(value) % 1) < 1e-9;

/** Axis of versions, which are whole numbers. */
const versionAxis = (size) => ({ ...axis((version) => version.toLocaleString(), size), incrs: WHOLE });

function axis(values, size, logarithmic = false) {
  const filter = (_, splits) => splits.map((split) => (!logarithmic || isDecade(split) ? split : null));
  return {
    stroke: () => colour("quiet"),
    grid: { stroke: () => colour("line"), width: 1, filter },
    ticks: { stroke: () => colour("line"), width: 1, filter },
    ...(values ? { values: (_, splits) => splits.map((split) => (split === null ? "" : values(split))) } : {}),
    ...(size ? { size } : {}),
  };
}

/** Keep a chart as wide as its place, and draw it again when the colours change. */
function fitted(chart, place) {
  const fit = () => chart.width !== place.clientWidth && chart.setSize({ width: place.clientWidth, height: HEIGHT });
  new ResizeObserver(fit).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.redraw(false, true));
  return chart;
}

/** Chart of values of each version, on a logarithmic scale; `pick` is called with a version, `zoom` with a range. */
export function versionChart(place, { values, size, lines = [{ colour: "blue" }], marks, pick, zoom }) {
  const line = (one) => ({
    stroke: () => colour(one.colour),
    width: 1.5,
    points: { size: 4 },
    spanGaps: lines.length > 1, // of replicas, not every version is seen
    ...(one.dash ? { dash: one.dash } : {}),
  });
  const chart = new uPlot(
    {
      width: place.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      scales: { x: { time: false }, y: { distr: 3 } },
      axes: [versionAxis(), axis(values, size, true)],
      series: [{}, ...lines.map(line)],
      cursor: { y: false, drag: { x: true, y: false, setScale: false } },
      hooks: {
        draw: [(drawn) => drawMarks(drawn, marks())],
        setSelect: [
          (drawn) => {
            const { left, width } = drawn.select;
            if (width < 5) return;
            zoom(Math.floor(drawn.posToVal(left, "x")), Math.ceil(drawn.posToVal(left + width, "x")));
            drawn.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          },
        ],
      },
    },
    [[], ...lines.map(() => [])],
    place,
  );
  chart.over.addEventListener("click", () => {
    const version = chart.data[0][chart.cursor.idx];
    if (version !== undefined) pick(version);
  });
  return fitted(chart, place);
}

export const densityValues = { values: (share) => `${Number((share * 100).toPrecision(3))} %`, size: 70 };
export const bytesValues = { values: (size) => bytes(size), size: 80 };

/** Phases of a version, in their order: dashed before the commit, solid in replicas. */
export const PHASES = [
  { name: "diff", colour: "blue", dash: [6, 3] },
  { name: "encode", colour: "purple", dash: [6, 3] },
  { name: "upload", colour: "amber", dash: [6, 3] },
  { name: "look", colour: "quiet" },
  { name: "fetch", colour: "green" },
  { name: "stage", colour: "blue" },
  { name: "pause", colour: "red" },
  { name: "swap", colour: "amber" },
];
export const phaseValues = { values: (seconds) => precise(seconds), size: 80, lines: PHASES };

function drawMarks(chart, marks) {
  const { ctx, bbox } = chart;
  const position = (version) => Math.round(chart.valToPos(version, "x", true));
  const inside = (x) => x >= bbox.left && x <= bbox.left + bbox.width;
  ctx.save();
  for (const [kind, name] of [["epochs", "purple"], ["reverts", "amber"], ["tags", "text"]]) {
    ctx.strokeStyle = colour(name);
    ctx.lineWidth = 1;
    ctx.setLineDash(kind === "epochs" ? [] : kind === "tags" ? [2, 3] : [6, 3]);
    for (const mark of marks[kind] ?? []) {
      const x = position(mark.version ?? mark);
      if (!inside(x)) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  for (const [kind, name, top] of [["anchors", "blue", true], ["skips", "green", false]]) {
    ctx.fillStyle = colour(name);
    const width = (marks[kind] ?? []).length > bbox.width / 10 ? 1 : 3;
    for (const version of marks[kind] ?? []) {
      const x = position(version);
      if (inside(x)) ctx.fillRect(x - 1, top ? bbox.top : bbox.top + bbox.height - 8, width, 8);
    }
  }
  ctx.restore();
}

/** Chart of versions over time: the newest one, and a line for each replica in the colour of its state. */
export function trackChart(place, engines, stateOf) {
  const stepped = uPlot.paths.stepped({ align: 1 });
  const replica = (engine) => ({
    paths: stepped,
    points: { show: false },
    stroke: () => colour(COLOURS[stateOf(engine)]),
    width: 1.5,
  });
  const newest = { paths: stepped, points: { show: false }, stroke: () => colour("green"), width: 3 };
  const chart = new uPlot(
    {
      width: place.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      scales: { y: { range: (_, low, high) => (low === high ? [Math.max(low - 1, 0), high + 1] : [low, high]) } },
      axes: [axis(), versionAxis(70)],
      series: [{}, newest, ...engines.map(replica)],
      cursor: { show: false },
    },
    [[], [], ...engines.map(() => [])],
    place,
  );
  return fitted(chart, place);
}

/** Columns of a track: a value for each moment, from where it changed. */
export function expanded(changes, length) {
  const values = [];
  for (let place = 0, next = 0, value = null; place < length; place += 1) {
    if (next < changes.length && changes[next][0] === place) {
      value = changes[next][1];
      next += 1;
    }
    values.push(value);
  }
  return values;
}
