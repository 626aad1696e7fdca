// Replicas: alerts, their versions over time, and the table.

import { get } from "./api.js";
import { expanded, trackChart } from "./charts.js";
import { byId, element, fill, say } from "./elements.js";
import { duration, plural, precise } from "./format.js";

const URGENT = new Set(["store", "history", "another chain", "silent"]);
const COLUMNS = 9;

export class Fleet {
  constructor() {
    this.rows = new Map();
    this.states = new Map();
    this.earlier = new Map();
    this.selected = null;
    this.chart = null;
    byId("fleet-filter").addEventListener("change", () => this.last && this.update(...this.last));
  }

  /** Show replicas and alerts as they are now. */
  update(found, picked) {
    this.last = [found, picked];
    showAlerts(found.alerts);
    byId("fleet-none").hidden = found.replicas.length > 0;
    byId("fleet-body").hidden = found.replicas.length === 0;
    const alerts = new Map();
    for (const alert of found.alerts) alerts.set(alert.engine, [...(alerts.get(alert.engine) ?? []), alert.kind]);
    this.states = new Map(found.replicas.map((one) => [one.engine, state(alerts.get(one.engine))]));
    const rank = { bad: 0, warn: 1, good: 2 };
    const order = [...found.replicas].sort((a, b) =>
      rank[this.states.get(a.engine)] - rank[this.states.get(b.engine)] || (b.lag ?? 0) - (a.lag ?? 0));
    const wanted = { all: () => true, alerts: (one) => alerts.has(one.engine), picked: (one) => one.version === picked };
    const shown = order.filter(wanted[byId("fleet-filter").value]);
    const body = byId("fleet-table").tBodies[0];
    const rows = shown.map((one) => this.row(one, alerts.get(one.engine) ?? [], found.time));
    if (rows.length !== body.rows.length || rows.some((row, place) => row !== body.rows[place])) {
      const focused = document.activeElement;
      fill(body, ...rows);
      if (body.contains(focused)) focused.focus();
    }
    say(byId("fleet-shown"), `${shown.length} of ${plural(found.replicas.length, "replica")}`);
  }

  row(one, kinds, now) {
    if (!this.rows.has(one.engine)) this.rows.set(one.engine, this.newRow(one.engine));
    const row = this.rows.get(one.engine);
    const state = kinds.length ? kinds.join(", ") : one.pinned ? "ready, pinned" : "ready";
    const reason = one.trouble || one.reason || one.error;
    const texts = [null, kinds.length && reason ? `${state}: ${reason}` : state, one.version ?? "unknown", one.lag ?? "unknown",
      one.answered_at === null ? "never" : `${duration(now - one.answered_at)} ago`, duration(one.silence_s),
      lastUpdate(one.phases), this.earlier.get(one.engine) ?? "", [one.software, one.deltachain && `deltachain ${one.deltachain}`].filter(Boolean).join(", ")];
    texts.forEach((text, place) => text !== null && say(row.cells[place], String(text)));
    row.cells[1].className = `wide ${this.states.get(one.engine)}`;
    row.classList.toggle("selected", one.engine === this.selected);
    row.dataset.engine = one.engine;
    return row;
  }

  newRow(engine) {
    const button = element("button", { type: "button", "aria-label": `Show ${engine} in the chart` }, engine);
    button.addEventListener("click", () => this.select(engine));
    return element("tr", {}, element("td", {}, button), ...Array.from({ length: COLUMNS - 1 }, () => element("td")));
  }

  select(engine) {
    this.selected = this.selected === engine ? null : engine;
    for (const [name, row] of this.rows) row.classList.toggle("selected", name === this.selected);
    this.chart?.redraw(false, true);
    byId("track-chart").scrollIntoView({ block: "nearest" });
  }

  /** Read the versions over time. */
  async loadTrack() {
    const found = await get("track");
    const engines = Object.keys(found.held);
    if (!engines.length) return;
    const place = byId("track-chart");
    if (!this.chart || this.chart.series.length !== engines.length + 2) {
      this.chart?.destroy();
      const stateOf = (engine) => (engine === this.selected ? "selected" : (this.states.get(engine) ?? "good"));
      this.chart = trackChart(place, engines, stateOf);
    }
    const columns = engines.map((engine) => expanded(found.held[engine], found.times.length));
    this.chart.setData([found.times, found.newest, ...columns]);
    const recent = (changes) => changes.slice(0, -1).map(([, version]) => version)
      .filter((version, place) => version !== null || place > 0).slice(-4).map((version) => version ?? "unknown").reverse();
    this.earlier = new Map(engines.map((engine) => [engine, recent(found.held[engine]).join(", ")]));
    place.setAttribute("aria-label", `Versions of ${plural(engines.length, "replica")} over ` +
      `${duration(found.times.at(-1) - found.times[0])}; the table of replicas has the numbers`);
  }
}

/** How long the last update took, from its commit until it was served. */
function lastUpdate(phases) {
  const parts = ["look", "fetch", "stage", "pause"].filter((name) => name in phases);
  if (!parts.length) return "";
  const whole = precise(parts.reduce((sum, name) => sum + phases[name], 0));
  return "pause" in phases ? `${whole}, pause ${precise(phases.pause)}` : whole;
}

function state(kinds) {
  if (!kinds) return "good";
  return kinds.some((kind) => URGENT.has(kind)) ? "bad" : "warn";
}

function showAlerts(alerts) {
  say(byId("alert-count"), alerts.length ? plural(alerts.length, "alert") : "No alerts");
  byId("alert-scroll").hidden = alerts.length === 0;
  const list = byId("alert-list");
  const key = JSON.stringify(alerts);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  fill(list, ...alerts.map((alert) => {
    const item = element("li", { "data-kind": alert.kind, "data-engine": alert.engine },
      element("strong", {}, alert.kind), alert.engine ? ` ${alert.engine}` : " chain", `: ${alert.message}`);
    if (URGENT.has(alert.kind)) item.setAttribute("data-urgent", "");
    return item;
  }));
}
