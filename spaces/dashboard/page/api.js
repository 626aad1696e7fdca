// Requests to the dashboard's server, with the token if it asks for one.

const STORED = "deltachain-token";

const early = new Map();

export class TokenNeeded extends Error {}

export function setToken(token) {
  sessionStorage.setItem(STORED, token.trim());
}

/** Start several requests side by side; the next `get` of each path takes its answer. */
export function getEarly(...paths) {
  for (const path of paths) {
    early.set(path, request(path));
    early.get(path).catch(() => {}); // whoever takes it sees the error
  }
}

/** Forget answers that nobody took. */
export function forgetEarly() {
  early.clear();
}

/** Take the token of an address that ends with `#token=...`, and show it no longer. */
export function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return;
  setToken(token);
  history.replaceState(null, "", location.pathname + location.search);
}

/** Return the JSON at a path; `null` if there is none. */
export function get(path) {
  const answer = early.get(path) ?? request(path);
  early.delete(path);
  return answer;
}

async function request(path) {
  const token = sessionStorage.getItem(STORED);
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch(`api/${path}`, { headers, cache: "no-store" });
  if (answer.status === 401) throw new TokenNeeded(token ? "wrong token" : "");
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}
