/**
 * Elements: made in one call, always from text, never from markup.
 *
 * Knows the DOM and nothing of environments. What an environment sends reaches the page through `el`'s children, which
 * become text nodes.
 */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @typedef {Node | string | number | null | undefined | false} Child
 */

/**
 * Make an HTML element.
 * @param {string} tag - Name, with classes after dots: `div.card.wide`.
 * @param {Record<string, any>} [properties] - `on` holds listeners, `data` data attributes; functions and booleans are
 *   set as properties, anything else as attributes; null and undefined are left out.
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement & Record<string, any>}
 */
export function el(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) set(element, key, value);
  element.append(...nodes(children));
  return element;
}

/**
 * Make an SVG element.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  element.append(...nodes(children));
  return element;
}

/**
 * Replace what an element contains.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
}

/**
 * Give the focus to the first element that a selector finds.
 * @param {Element} within
 * @param {string} selector
 */
export function focusOn(within, selector) {
  const found = within.querySelector(selector);
  if (found instanceof HTMLElement) found.focus();
}

let counter = 0;

/**
 * Return an id that no other element has.
 * @param {string} prefix
 */
export function uniqueId(prefix) {
  counter += 1;
  return `${prefix}-${counter}`;
}

/**
 * Draw one of the page's icons; decoration: the text beside it carries the meaning.
 * @param {keyof typeof ICONS} name
 */
export function icon(name) {
  const drawing = svg("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true", focusable: "false" });
  for (const path of ICONS[name]) drawing.append(svg("path", { d: path }));
  return drawing;
}

const ICONS = {
  reset: ["M12.8 6.2A5.2 5.2 0 1 0 13.2 9", "M13.4 2.8v3.6H9.8"],
  play: ["M5 3.2v9.6l7.6-4.8z"],
  copy: ["M6 6h7v7H6z", "M3.2 10V3.2H10"],
  tick: ["M3.2 8.4l3.2 3.2 6.4-7"],
  cross: ["M4 4l8 8", "M12 4l-8 8"],
  plus: ["M8 3.2v9.6", "M3.2 8h9.6"],
  down: ["M3.6 6l4.4 4.4L12.4 6"],
  save: ["M8 2.6v7.2", "M4.8 7L8 10.2 11.2 7", "M3 13.2h10"],
  send: ["M8 13V3.4", "M4 7.2l4-4 4 4"],
  stop: ["M4 4h8v8H4z"],
  first: ["M3.6 3.4v9.2", "M12.4 3.4L6 8l6.4 4.6z"],
  back: ["M10.4 3.4L5 8l5.4 4.6"],
  forward: ["M5.6 3.4L11 8l-5.4 4.6"],
  cut: ["M2.6 8h2.2", "M6.9 8h2.2", "M11.2 8h2.2"],
  alert: ["M8 2.6L14.2 13H1.8z", "M8 6.6v3", "M8 11.3v.2"],
  sun: [
    "M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6z",
    "M8 1.4v1.4M8 13.2v1.4M1.4 8h1.4M13.2 8h1.4M3.3 3.3l1 1M11.7 11.7l1 1M12.7 3.3l-1 1M4.3 11.7l-1 1",
  ],
  moon: ["M13 9.6A5.6 5.6 0 0 1 6.4 3 5.6 5.6 0 1 0 13 9.6z"],
  eye: [
    "M1.6 8S4 3.6 8 3.6 14.4 8 14.4 8 12 12.4 8 12.4 1.6 8 1.6 8z",
    "M8 6.4a1.6 1.6 0 1 0 0 3.2 1.6 1.6 0 0 0 0-3.2z",
  ],
};

/** @param {(Child | Child[])[]} children */
function nodes(children) {
  return children
    .flat()
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child)));
}

/**
 * @param {HTMLElement} element
 * @param {string} key
 * @param {any} value
 */
function set(element, key, value) {
  if (value === null || value === undefined) return;
  if (key === "on") {
    for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
  } else if (key === "data") {
    for (const [name, text] of Object.entries(value)) element.dataset[name] = String(text);
  } else if (typeof value === "boolean") {
    /** @type {any} */ (element)[key] = value;
  } else {
    element.setAttribute(key, String(value));
  }
}
