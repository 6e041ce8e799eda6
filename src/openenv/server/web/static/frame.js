/**
 * The environment's own picture of an observation: its HTML, in a frame that can do nothing and is as high as it needs.
 *
 * The frame has no scripts, no forms, no pop-ups and no way out of the page's content policy. It shares the page's
 * origin, because the page can measure no other content; without scripts the content cannot use that. A new picture
 * replaces the old one when it is there, so that nothing flickers.
 */

import { el } from "./element.js";

const STYLE =
  "html{font:15px/1.5 system-ui,sans-serif;overflow:auto}body{margin:0;padding:4px}" +
  "svg,img,canvas,video{max-width:100%;height:auto}" +
  "body>svg:only-child,body>img:only-child{display:block;margin:0 auto}";
const MOST_HEIGHT = 2400;
const SCROLLBAR = 16;

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
    const frame = el("iframe", {
      sandbox: "allow-same-origin", // never with allow-scripts: together they open the frame
      title: "The environment's own view",
      referrerpolicy: "no-referrer",
    });
    frame.srcdoc = documentOf(html, size !== null);
    frame.addEventListener(
      "load",
      () => {
        old.forEach((element) => element.remove());
        if (size === null) this.#follow(/** @type {any} */ (frame));
      },
      { once: true },
    );
    if (old.length > 2) old.slice(0, -1).forEach((element) => element.remove());
    if (size !== null) this.node.style.height = "";
    this.node.append(frame);
  }

  /** Be as high as the frame's content, also when that changes. @param {HTMLIFrameElement} frame */
  #follow(frame) {
    const root = frame.contentDocument?.documentElement;
    if (!root) return;
    // What is placed outside of the flow overflows only while the frame is too low, so its height is remembered.
    let least = 0;
    const fit = () => {
      if (!frame.isConnected) return observer.disconnect();
      if (frame.clientWidth === 0) return; // in a hidden tab
      if (root.scrollHeight > root.clientHeight) least = Math.max(least, root.scrollHeight);
      const bar = root.scrollWidth > root.clientWidth ? SCROLLBAR : 0;
      const height = Math.min(MOST_HEIGHT, Math.max(Math.ceil(root.getBoundingClientRect().height), least) + bar);
      const border = this.node.offsetHeight - this.node.clientHeight;
      this.node.style.height = `${height + border}px`;
    };
    const observer = new ResizeObserver(fit);
    observer.observe(root);
    observer.observe(frame);
    fit();
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
