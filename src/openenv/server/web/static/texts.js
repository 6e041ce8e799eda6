/**
 * Texts that agents and models wrote: always text, with what would deceive a reader made visible.
 *
 * Control characters and marks that reverse the direction of writing could show something else than what is there.
 */

import { el, fill } from "./element.js";

const MOST_SHOWN = 20_000;
const FOLDED_LINES = 12;
const CLAMPED_LINES = 24;
const CLAMPED_CHARACTERS = 3000;
// Tabs and line feeds stay; so do the two joiners that scripts and emoji need.
const ODD =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const COLOURS = /\u001b\[[0-9;]*m/g;

/**
 * Return a text as nodes, in which odd characters are escapes.
 * @param {string} text
 * @returns {(string | HTMLElement)[]}
 */
export function visible(text) {
  const plain = text.replace(/\r\n/g, "\n");
  if (plain.search(ODD) < 0) return [plain];
  /** @type {(string | HTMLElement)[]} */
  const parts = [];
  let from = 0;
  for (const match of plain.matchAll(ODD)) {
    const code = match[0].charCodeAt(0);
    const escape = code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
    parts.push(plain.slice(from, match.index), el("span.odd", {}, escape));
    from = (match.index ?? 0) + 1;
  }
  parts.push(plain.slice(from));
  return parts;
}

/** A sentence with `code` in it, as authors write docstrings. @param {string} text */
export function withCode(text) {
  return text.split(/`([^`]+)`/).map((part, index) => (index % 2 ? el("code", {}, part) : part));
}

/** What a program printed, without the colours of a terminal. @param {string} text */
export function outputOf(text) {
  return text.replace(COLOURS, "");
}

/**
 * A block of text in fixed width, cut with a button to see the rest.
 * @param {string} text
 * @param {object} [options]
 * @param {string} [options.kind] - Classes, after dots.
 * @param {number} [options.cut] - How many characters are not there at all.
 * @param {string} [options.label] - Makes it a place that can be scrolled with keys.
 * @param {number} [options.most] - How many characters are shown at first.
 */
export function codeBlock(text, { kind = "", cut = 0, label = "", most = MOST_SHOWN } = {}) {
  const block = el(`pre.text${kind}`, label ? { tabindex: 0, role: "group", "aria-label": label } : {});
  fill(block, visible(text.slice(0, most)));
  const more = text.length > most && el("button.link.unclamp", { type: "button" }, `Show all ${text.length} characters`);
  if (more) {
    more.addEventListener("click", () => {
      fill(block, visible(text));
      more.remove();
    });
  }
  const missing = cut > 0 && el("p.hint", {}, `${cut} more characters are in exports only.`);
  return more || missing ? el("div", {}, block, more, missing) : block;
}

/**
 * A text whose beginning is shown; a button shows the rest.
 * @param {string} text
 * @param {object} [options]
 * @param {string} [options.kind] - Classes, after dots.
 * @param {number} [options.cut] - How many characters are not there at all.
 * @param {string} [options.label]
 */
export function clamped(text, { kind = "", cut = 0, label = "" } = {}) {
  const start = text.split("\n", CLAMPED_LINES + 1).slice(0, CLAMPED_LINES).join("\n").slice(0, CLAMPED_CHARACTERS);
  // A few more lines cost less than a button.
  if (text.length - start.length < 400 && text.slice(start.length).split("\n").length < 6) {
    return codeBlock(text, { kind, cut, label: isLong(text) && !kind ? label : "" });
  }
  const lines = text.split("\n").length;
  const size = lines > CLAMPED_LINES ? `${formatCount(lines)} lines` : `${formatCount(text.length)} characters`;
  const all = () => node.replaceChildren(codeBlock(text, { kind, cut, label: label || "Whole text", most: text.length }));
  const more = el("button.link.unclamp", { type: "button", on: { click: all } }, `Show all ${size}`);
  const node = el("div", {}, el(`pre.text${kind}`, {}, visible(start), "…"), more);
  return node;
}

/**
 * Something that is folded until it is opened, and made only then.
 * @param {(string | HTMLElement | false | null)[]} title
 * @param {() => HTMLElement} make
 * @param {object} [options]
 * @param {boolean} [options.isOpen]
 * @param {string} [options.kind]
 */
export function folded(title, make, { isOpen = false, kind = "" } = {}) {
  const node = el(`details.fold${kind}`, {}, el("summary", {}, title));
  const open = () => {
    if (node.open && node.childElementCount === 1) node.append(make());
  };
  node.addEventListener("toggle", open);
  node.open = isOpen;
  open();
  return node;
}

/** Say whether a text is long enough to be folded. @param {string} text */
export function isLong(text) {
  return text.length > 1500 || text.split("\n", FOLDED_LINES + 1).length > FOLDED_LINES;
}

/** The first line of a text, cut. @param {string} text @param {number} [most] */
export function firstLine(text, most = 100) {
  const line = text.trimStart().split("\n", 1)[0];
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

/** How long ago something was. @param {number} seconds */
export function formatAge(seconds) {
  if (seconds < 120) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

/** A moment, in the visitor's time. @param {number} seconds - Since 1970. */
export function formatMoment(seconds) {
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) || seconds <= 0 ? "–" : date.toLocaleString([], { hour12: false });
}

/** Numbers with separators: 12,345. @param {number} value */
export function formatCount(value) {
  return Math.round(value).toLocaleString("en");
}

/** @param {number | null | undefined} value */
export function formatShare(value) {
  return value === null || value === undefined ? "–" : `${(value * 100).toFixed(value === 0 || value === 1 ? 0 : 1)} %`;
}
