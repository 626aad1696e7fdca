// The page: asks the server for what is new, and shows it.

import { forgetEarly, get, getEarly, setToken, takeToken, TokenNeeded } from "./api.js";
import { byId, element, fact, fill, say } from "./elements.js";
import { Fleet } from "./fleet.js";
import { bytes, count, duration, moment, plural } from "./format.js";
import { TABLE, Versions } from "./versions.js";

const PAUSE_MS = 2000;
const TRACK_EVERY = 3;

let fleet;
let versions;
let overview;
let totals; // of all versions
let round = 0;

async function refresh() {
  overview = await get("overview");
  if (totals?.revision !== overview.chain.revision) {
    totals = await get("chain");
    showRecords(totals);
  }
  byId("main").hidden = false; // charts need their width
  fleet ??= new Fleet();
  versions ??= new Versions(showPicked);
  showChain(overview);
  showPicked();
  const isDue = overview.replicas.length > 0 && round % TRACK_EVERY === 0;
  await Promise.all([isDue ? fleet.loadTrack() : null, versions.update(overview)]);
  showPicked();
  round += 1;
}

function showPicked() {
  fleet.update(overview, versions.picked);
  versions.showHolders(overview.replicas, (engine) => fleet.select(engine));
}

function showChain({ chain, replicas, time, newest }) {
  say(byId("chain-url"), chain.url);
  document.title = `${overview.alerts.length ? `(${overview.alerts.length}) ` : ""}deltachain ${chain.url}`;
  const head = chain.head;
  const { model, nbytes, encodings, edges } = totals;
  const reading = chain.indexed < chain.found ? `, reading ${chain.indexed} of ${chain.found}` : "";
  const names = Object.entries(encodings).map(([name, number]) => `${name} (${count(number)})`);
  const ways = Object.entries(edges).map(([kind, number]) => plural(number, kind));
  const shown = [
    ["Newest version", newest === null ? "none yet" : `${newest}${reading}`],
    ["Age of the newest", head ? duration(time - head.time) : "unknown"],
    ["Epoch", head ? String(head.epoch) : "unknown"],
    ["Model", model ? `${count(model.numel)} elements in ${plural(model.tensors, "tensor")}, ${bytes(model.nbytes)}` : "unknown"],
    ["Bytes committed", bytes(nbytes)],
    ["Ways", ways.join(", ") || "none"],
    ["Encodings", names.join(", ") || "none"],
    ["Replicas ready", replicas.length ? `${replicas.filter((one) => one.ready && !one.trouble).length} of ${replicas.length}` : "none named"],
  ];
  const key = JSON.stringify(shown);
  if (byId("facts").dataset.key !== key) fill(byId("facts"), ...shown.map(([name, value]) => fact(name, value)));
  byId("facts").dataset.key = key;
}

function showRecords(chain) {
  const list = (title, items, none) => element("div", {}, element("h3", {}, title),
    items.length ? element("ul", {}, ...items.map((item) => element("li", {}, item))) : element("p", {}, none));
  const tags = chain.tags.map((tag) => `${tag.name}: version ${tag.version}`);
  const prunes = chain.prunes === null ? [] : [
    `record ${chain.prunes.number} of ${moment(chain.prunes.time)}: ${plural(chain.prunes.edges, "edge")}`,
    ...chain.prunes.ranges.map((one) => `${one.kind}${one.span > 1 ? ` over ${one.span}` : ""}: versions ${one.first} to ${one.last}`),
  ];
  const keys = chain.signers.map((one) => `${one.key}: ${plural(one.versions, "version")}, ${one.trusted ? "trusted" : "not checked"}`);
  fill(byId("records"), list("Tags", tags, "No tag is set."), list("Prunes", prunes, "Nothing was pruned."),
    list("Keys", keys, "The versions are not signed."));
}

async function run() {
  for (;;) {
    try {
      if (!overview) getEarly("overview", "chain", "track", "chart", TABLE);
      if (!document.hidden) await refresh();
      say(byId("connection"), overview ? `Live, as of ${new Date(overview.time * 1000).toLocaleTimeString()}` : "");
      delete byId("connection").dataset.lost;
      byId("token-form").hidden = true;
    } catch (error) {
      forgetEarly();
      if (error instanceof TokenNeeded) {
        await askToken(error.message);
        continue;
      }
      byId("connection").dataset.lost = "";
      say(byId("connection"), `Out of date: ${error.message}`);
    }
    await new Promise((resume) => setTimeout(resume, PAUSE_MS));
  }
}

function askToken(refused) {
  say(byId("connection"), "A token is needed");
  say(byId("token-refused"), refused);
  byId("main").hidden = true;
  byId("token-form").hidden = false;
  byId("token").focus();
  return new Promise((resume) => {
    byId("token-form").onsubmit = (event) => {
      event.preventDefault();
      setToken(byId("token").value);
      byId("token").value = "";
      resume();
    };
  });
}

takeToken();
run();
