// Elements of the page. Whatever comes from a chain or a replica becomes text, never HTML.

export const byId = (id) => document.getElementById(id);

/** Create an element. `properties` are set as such; `data-` and `aria-` names as attributes. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function fill(parent, ...children) {
  parent.replaceChildren(...children);
}

/** A name and its value, for lists of facts. */
export function fact(name, value) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value));
}

/** Change text only where it differs, so that screen readers hear changes alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
