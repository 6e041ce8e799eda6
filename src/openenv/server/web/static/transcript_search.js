/**
 * Search in a transcript, also in what is folded, cut or not yet drawn: a field, the number of hits, and ways to them.
 */

import { el, icon } from "./element.js";
import { textOf } from "./transcript_parts.js";

const WAIT_MS = 150;
const MOST = 2000;

/** @typedef {{turn: number, part: any, nth: number}} Hit - The nth occurrence in a part. */

/** A search field with its hits. */
export class TranscriptSearch {
  /**
   * @param {object} options
   * @param {() => {turn: number, parts: any[]}[]} options.turns - With their parts as they are shown.
   * @param {(hit: Hit) => HTMLElement | null} options.reveal - Draw a part completely; return its element.
   */
  constructor({ turns, reveal }) {
    this.turns = turns;
    this.reveal = reveal;
    this.timer = 0;
    /** @type {Hit[]} */
    this.hits = [];
    this.at = -1;
    this.input = el("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": "Search the transcript",
      autocomplete: "off",
      on: { input: () => this.#soon(), keydown: (/** @type {KeyboardEvent} */ event) => this.#key(event) },
    });
    this.status = el("span.hint", { role: "status" });
    this.node = el(
      "div.search",
      { role: "search" },
      this.input,
      this.#button("back", "Previous hit", -1),
      this.#button("forward", "Next hit", 1),
      this.status,
    );
  }

  /** Put the cursor into the field. */
  focus() {
    this.input.focus();
    this.input.select();
  }

  /** @param {any} name @param {string} label @param {number} by */
  #button(name, label, by) {
    const options = { type: "button", "aria-label": label, title: label, on: { click: () => this.#move(by) } };
    return el("button.small", options, icon(name));
  }

  #soon() {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.#find(), WAIT_MS);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.key !== "Enter") return;
    event.preventDefault();
    clearTimeout(this.timer);
    if (this.input.value.toLowerCase() !== this.last) this.#find();
    else this.#move(event.shiftKey ? -1 : 1);
  }

  #find() {
    const wanted = this.input.value.toLowerCase();
    this.last = wanted;
    this.hits = [];
    this.at = -1;
    mark(null);
    if (wanted === "") {
      this.status.textContent = "";
      return;
    }
    for (const place of this.turns()) this.#findIn(place, wanted);
    if (this.hits.length === 0) this.status.textContent = "not found";
    else this.#move(1);
  }

  /** @param {{turn: number, parts: any[]}} place @param {string} wanted */
  #findIn({ turn, parts }, wanted) {
    for (const part of parts) {
      const text = textOf(part).toLowerCase();
      let from = text.indexOf(wanted);
      for (let nth = 0; from >= 0 && this.hits.length < MOST; nth += 1) {
        this.hits.push({ turn, part, nth });
        from = text.indexOf(wanted, from + wanted.length);
      }
    }
  }

  /** @param {number} by */
  #move(by) {
    if (this.hits.length === 0) return;
    this.at = (this.at + by + this.hits.length) % this.hits.length;
    const hit = this.hits[this.at];
    const many = this.hits.length >= MOST ? "+" : "";
    this.status.textContent = `${this.at + 1} of ${this.hits.length}${many}, turn ${hit.turn}`;
    const node = this.reveal(hit);
    if (node) show(node, this.input.value.toLowerCase(), hit.nth);
  }
}

/** Mark and scroll to an occurrence of a text. @param {HTMLElement} node @param {string} wanted @param {number} nth */
function show(node, wanted, nth) {
  const range = rangeOf(node, wanted, nth);
  mark(range);
  if (!range) return node.scrollIntoView({ block: "center" });
  const box = range.startContainer.parentElement?.closest("pre");
  if (box) {
    const above = range.getBoundingClientRect().top - box.getBoundingClientRect().top;
    box.scrollTop += above - box.clientHeight / 2;
  }
  scrollBy({ top: range.getBoundingClientRect().top - innerHeight / 2, behavior: "instant" });
}

/** @param {Range | null} range */
function mark(range) {
  const { highlights } = /** @type {any} */ (CSS);
  if (!highlights) return; // the place is still scrolled to
  if (range) highlights.set("found", new /** @type {any} */ (window).Highlight(range));
  else highlights.delete("found");
}

/** @param {HTMLElement} node @param {string} wanted @param {number} nth @returns {Range | null} */
function rangeOf(node, wanted, nth) {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  let left = nth;
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent?.toLowerCase() ?? "";
    for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
      if (left === 0) {
        const range = document.createRange();
        range.setStart(walker.currentNode, at);
        range.setEnd(walker.currentNode, at + wanted.length);
        return range;
      }
      left -= 1;
    }
  }
  return null;
}
