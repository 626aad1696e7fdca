// Versions of the chain: charts, the table, and one version with the replicas that hold it.

import { get } from "./api.js";
import { bytesValues, densityValues, PHASES, phaseValues, versionChart } from "./charts.js";
import { byId, element, fact, fill, say } from "./elements.js";
import { bytes, count, moment, percent, plural, precise } from "./format.js";

const ROWS = 20;
export const TABLE = `versions?count=${ROWS}`; // its newest page
const MARKS = { anchors: "anchor", skips: "skip", epochs: "new epoch", reverts: "revert", tags: "tag" };

export class Versions {
  constructor(onPick) {
    this.onPick = onPick;
    this.picked = null;
    this.range = null; // null follows the newest versions
    this.before = null;
    this.marks = {};
    this.revision = null;
    const common = { marks: () => this.marks, pick: (v) => this.pick(v), zoom: (a, b) => this.zoom(a, b) };
    this.density = versionChart(byId("density-chart"), { ...densityValues, ...common });
    this.bytes = versionChart(byId("bytes-chart"), { ...bytesValues, ...common });
    this.phases = versionChart(byId("phases-chart"), { ...phaseValues, ...common });
    this.listen();
  }

  listen() {
    byId("range").addEventListener("submit", (event) => {
      event.preventDefault();
      const last = byId("range-last").value;
      this.zoom(Number(byId("range-first").value || 0), last === "" ? Number.MAX_SAFE_INTEGER : Number(last));
    });
    byId("range-all").addEventListener("click", () => this.zoom(null));
    byId("pick").addEventListener("submit", (event) => {
      event.preventDefault();
      this.pick(Number(byId("pick-version").value));
    });
    byId("page-newest").addEventListener("click", () => this.turn(null));
    byId("page-newer").addEventListener("click", () => this.turn(this.shown.last + 1 + ROWS));
    byId("page-older").addEventListener("click", () => this.turn(this.shown.first));
  }

  /** Show what is new; does nothing while the chain is as it was. */
  async update({ chain, phases }) {
    this.length = chain.indexed;
    const revision = `${chain.revision} ${phases}`;
    if (revision === this.revision) return;
    const [drawn] = await Promise.all([this.loadCharts(), this.loadTable()]);
    if (this.picked !== null) await this.loadPicked();
    this.revision = `${drawn} ${phases}`;
  }

  async zoom(first, last) {
    this.range = first === null || last < first ? null : [Math.max(0, first), last];
    await this.loadCharts();
  }

  /** Draw the charts; return the revision that they show. */
  async loadCharts() {
    const query = this.range ? `?first=${this.range[0]}&last=${this.range[1]}` : "";
    const found = await get(`chart${query}`);
    this.marks = found.marks;
    this.density.setData([found.versions, positive(found.density)]);
    this.bytes.setData([found.versions, positive(found.nbytes)]);
    const span = found.versions.length ? `versions ${found.first} to ${found.last}` : "no version";
    const most = (values, say) => (values.length ? `, at most ${say(values.reduce((a, b) => Math.max(a, b)))}` : "");
    byId("density-chart").setAttribute("aria-label", `Changed elements of ${span}${most(found.density, percent)}; the table of versions has the numbers`);
    byId("bytes-chart").setAttribute("aria-label", `Bytes of ${span}${most(found.nbytes, bytes)}; the table of versions has the numbers`);
    const marks = Object.entries(MARKS).map(([kind, name]) =>
      element("li", {}, element("span", { className: `swatch ${kind}` }), plural((found.marks[kind] ?? []).length, name)));
    fill(byId("marks"), ...marks);
    this.showPhases(found, span);
    return found.revision;
  }

  showPhases(found, span) {
    const known = PHASES.filter(({ name }) => found.phases[name].length);
    byId("phases").hidden = known.length === 0;
    const none = found.versions.map(() => null);
    const column = (seconds) => (seconds.length ? positive(seconds) : none);
    this.phases.setData([found.versions, ...PHASES.map(({ name }) => column(found.phases[name]))]);
    byId("phases-chart").setAttribute("aria-label", `Times of ${known.map((one) => one.name).join(", ")} of ${span}; ` +
      "the table of a picked version has the numbers");
    fill(byId("phase-names"), ...known.map((one) => element("li", {},
      element("span", { className: `stroke ${one.colour}${one.dash ? " dashed" : ""}` }), one.name)));
  }

  async turn(before) {
    this.before = before !== null && before >= this.length ? null : before;
    await this.loadTable();
  }

  async loadTable() {
    const before = this.before === null ? "" : `&before=${this.before}`;
    this.shown = await get(`${TABLE}${before}`);
    const focused = document.activeElement?.dataset?.version;
    fill(byId("version-table").tBodies[0], ...this.shown.versions.map((row) => this.row(row)));
    if (focused) document.querySelector(`button[data-version="${focused}"]`)?.focus();
    byId("page-newest").disabled = byId("page-newer").disabled = this.before === null;
    byId("page-older").disabled = this.shown.first <= 0;
    say(byId("page-range"), this.shown.last < 0 ? "no version yet" : `versions ${this.shown.first} to ${this.shown.last}`);
  }

  row(row) {
    const pick = element("button", { type: "button", "data-version": row.version, "aria-label": `Pick version ${row.version}` }, String(row.version));
    pick.addEventListener("click", () => this.pick(row.version));
    const kind = row.reverted_to === null ? row.kind : `revert to ${row.reverted_to}`;
    const marks = [kind, ...(row.pruned ? ["pruned"] : []), ...row.tags.map((name) => `tag ${name}`)].join(", ");
    const cells = [pick, marks, `${count(row.nnz)} (${percent(row.density)})`, bytes(row.nbytes), row.encodings.join(", "),
      row.step === null ? "" : String(row.step), String(row.epoch), moment(row.time), signedBy(row)];
    const made = element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
    made.classList.toggle("selected", row.version === this.picked);
    return made;
  }

  async pick(version) {
    this.picked = version;
    byId("pick-version").value = version;
    await Promise.all([this.loadPicked(), this.loadTable()]);
    this.onPick();
  }

  async loadPicked() {
    const version = this.picked;
    this.found = await get(`versions/${version}`);
    if (version === this.picked) this.showPicked();
  }

  showPicked() {
    const found = this.found;
    this.holders = element("div", { id: "holders" });
    if (found === null) {
      fill(byId("picked"), element("p", {}, `Version ${this.picked} is not in this chain, or its manifest is lost.`), this.holders);
      return;
    }
    const facts = [
      ["Committed", moment(found.time)],
      ["Trainer step", found.step === null ? "not given" : String(found.step)],
      ["Changed", `${count(found.nnz)} of ${count(found.numel)} (${percent(found.density)})`],
      ["Epoch", String(found.epoch)],
      ["Signed by", signedBy(found) || "nobody"],
      ["Tags", found.tags.join(", ") || "none"],
      ["State", element("span", { className: "mono" }, found.state)],
      ["Manifest", element("span", { className: "mono" }, found.manifest)],
      ...Object.entries(found.metadata),
    ];
    const ways = (found.edges.length ? found.edges : [{ ...found, base: null, parts: null, pruned: false }]).map((edge) =>
      element("li", {}, `${edge.kind}${edge.base === null ? "" : ` from version ${edge.base}`}: ${bytes(edge.nbytes)}` +
        `${edge.encodings.length ? `, ${edge.encodings.join(", ")}` : ""}${edge.pruned ? ", pruned" : ""}`));
    fill(byId("picked"),
      element("h3", {}, `Version ${found.version}`),
      this.holders,
      element("dl", { className: "facts" }, ...facts.map(([name, value]) => fact(name, value))),
      ...phaseTable(found.phases),
      element("h3", {}, "Ways to it"),
      element("ul", {}, ...ways));
  }

  /** Show which replicas hold the picked version. */
  showHolders(replicas, select) {
    if (this.picked === null || !this.holders) return;
    const names = replicas.filter((one) => one.version === this.picked).map((one) => one.engine);
    const key = JSON.stringify([replicas.length, names]);
    if (this.holders.dataset.key === key) return;
    this.holders.dataset.key = key;
    if (!replicas.length) return;
    const links = names.slice(0, 50).map((name) => {
      const button = element("button", { type: "button" }, name);
      button.addEventListener("click", () => select(name));
      return element("li", {}, button);
    });
    const more = names.length > links.length ? [element("li", {}, `and ${names.length - links.length} more`)] : [];
    fill(this.holders, element("p", {}, `Held by ${names.length} of ${plural(replicas.length, "replica")}`),
      element("div", { className: "scroll holders", tabIndex: 0, role: "region", "aria-label": "Holders" },
        element("ul", { className: "marks" }, ...links, ...more)));
  }
}

/** Values on a logarithmic scale, where 0 has no place. */
const positive = (values) => values.map((value) => value || null);

/** Table of the phases of a version, from the diff to the swap. */
function phaseTable(phases) {
  if (!phases.length) return [];
  const row = (one) => {
    const slowest = one.replicas > 1 ? `${precise(one.slowest_s)} in ${one.slowest}` : "";
    const where = one.replicas ? plural(one.replicas, "replica") : "publisher";
    const part = { upload: "upload, a part of encode", swap: "swap, a part of pause" }[one.name] ?? one.name;
    return element("tr", {}, element("th", { scope: "row" }, part),
      ...[precise(one.seconds), where, slowest].map((text) => element("td", {}, text)));
  };
  const heads = ["Phase", "Time", "Of", "Slowest"].map((name) => element("th", { scope: "col" }, name));
  const whole = phases.filter((one) => !["upload", "swap"].includes(one.name)).reduce((sum, one) => sum + one.seconds, 0);
  return [
    element("h3", { id: "phase-table-title" }, "Phases"),
    element("p", {}, `${precise(whole)} in all. Times of several replicas are medians. ` +
      "Look, from the commit on, holds the difference of both clocks."),
    element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-labelledby": "phase-table-title" },
      element("table", { id: "phase-table" }, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...phases.map(row)))),
  ];
}

function signedBy(row) {
  if (row.signed_by.length) return row.signed_by.map((key) => key.slice(0, 8)).join(", ");
  return row.signers.length ? `${row.signers.map((key) => key.slice(0, 8)).join(", ")} (not checked)` : "";
}
