/**
 * The environment's own picture of an observation: its HTML, in a frame that can do nothing.
 *
 * The frame has no origin, no scripts, no forms and no way out of the page's content policy. A new picture replaces the
 * old one when it is there, so that nothing flickers.
 */

import { el } from "./element.js";

const STYLE =
  "html{font:15px/1.5 system-ui,sans-serif;overflow:auto}body{margin:0;padding:4px}" +
  "body>svg:only-child,body>img:only-child{display:block;max-width:100%;height:auto;margin:0 auto}";

/** Shows the newest HTML that it was given. */
export class Frame {
  constructor() {
    this.node = el("div.frame", { hidden: true });
    /** @type {string | null} */
    this.html = null;
  }

  /** @param {string | null} html */
  show(html) {
    this.node.hidden = html === null;
    if (html === this.html) return;
    this.html = html;
    if (html === null) return this.node.replaceChildren();
    const size = sizeOf(html);
    this.node.classList.toggle("is-paper", size === null && !adaptsItself(html));
    this.node.style.aspectRatio = size ? `${size.width} / ${size.height}` : "";
    this.node.style.maxWidth = size ? `min(${Math.max(size.width, 440)}px, ${(58 * size.width) / size.height}vh)` : "";
    const old = /** @type {HTMLElement[]} */ ([...this.node.children]);
    for (const element of old) element.inert = true;
    const frame = el("iframe", { sandbox: "", title: "The environment's own view", referrerpolicy: "no-referrer" });
    frame.srcdoc = documentOf(html, size !== null);
    frame.addEventListener("load", () => old.forEach((element) => element.remove()), { once: true });
    if (old.length > 2) old.slice(0, -1).forEach((element) => element.remove());
    this.node.append(frame);
  }
}

/** Whether HTML has colours for light and dark, so that it needs no paper below it. @param {string} html */
function adaptsItself(html) {
  return /color-scheme|light-dark\(/.test(html);
}

/** @param {string} html @param {boolean} isPicture */
function documentOf(html, isPicture) {
  const scheme = isPicture || adaptsItself(html) ? "light dark" : "light";
  const more = isPicture ? "body{padding:0}body>svg{width:100%}" : "";
  return `<!doctype html><meta name="color-scheme" content="${scheme}"><style>${STYLE}${more}</style>${html}`;
}

/**
 * Find the size of HTML that is one drawing. It is not parsed: even that would run against the page's content policy.
 * @param {string} html
 */
function sizeOf(html) {
  const tag = /^\s*<svg\b([^>]*)>[\s\S]*<\/svg>\s*$/i.exec(html)?.[1];
  if (tag === undefined) return null;
  const read = (/** @type {string} */ name) =>
    new RegExp(`\\b${name}\\s*=\\s*["']([^"']*)["']`, "i").exec(tag)?.[1] ?? "";
  const box = read("viewBox")
    .split(/[\s,]+/)
    .map(Number);
  const width = Number.parseFloat(read("width")) || box[2];
  const height = Number.parseFloat(read("height")) || box[3];
  return width > 0 && height > 0 ? { width, height } : null;
}
