/**
 * A list of any length of which only the visible rows exist. Rows are asked for in pages, as they come into view.
 *
 * Knows positions and keys; what a row shows is the caller's.
 */

import { el, fill, uniqueId } from "./element.js";

const PAGE = 100;
const OVERSCAN = 8;
const WAIT_MS = 60;
const TALLEST = 15_000_000; // browsers cut what is taller

/** A list that scrolls. */
export class VirtualList {
  /**
   * @param {object} options
   * @param {string} options.label
   * @param {(offset: number, limit: number) => Promise<{total: number, rows: any[]}>} options.load
   * @param {(row: any, index: number) => HTMLElement[]} options.cells
   * @param {(row: any) => void} options.open
   * @param {(row: any) => void} options.mark - Called for the space key.
   * @param {(error: any) => void} options.failed
   * @param {HTMLElement} options.head - The row of titles.
   */
  constructor({ label, load, cells, open, mark, failed, head }) {
    this.options = { load, cells, open, mark, failed };
    this.total = 0;
    this.active = -1;
    /** @type {Map<number, any[] | null>} - Rows by page; null while they are asked for. */
    this.pages = new Map();
    this.version = 0;
    this.timer = 0;
    this.frame = 0;
    this.kept = 0;
    this.prefix = uniqueId("row");
    this.space = el("div.virtual-space");
    this.head = el("div.virtual-top", { role: "rowgroup" }, head);
    this.node = el(
      "div.virtual",
      { role: "grid", tabindex: 0, "aria-label": label, "aria-readonly": "true" },
      this.head,
      el("div", { role: "rowgroup" }, this.space),
    );
    this.narrow = matchMedia("(max-width: 760px)");
    this.narrow.addEventListener("change", () => this.#resized());
    this.node.addEventListener("scroll", () => this.#soon(), { passive: true });
    this.node.addEventListener("keydown", (event) => this.#key(event));
    this.space.addEventListener("click", (event) => this.#click(event));
    new ResizeObserver(() => this.#soon()).observe(this.node);
  }

  /** Ask for everything again; the place is kept unless `isOther`. @param {boolean} isOther - Whether it is another list. */
  async reload(isOther) {
    this.version += 1;
    const { version } = this;
    const first = isOther ? 0 : Math.floor(this.#top() / PAGE);
    const answer = await this.options.load(first * PAGE, PAGE);
    if (version !== this.version) return;
    this.pages = new Map([[first, answer.rows]]);
    this.total = answer.total;
    if (isOther) {
      this.active = -1;
      this.node.scrollTop = 0;
    }
    this.#resized();
  }

  /** Remember what is in view, before the list leaves the page. */
  keepPlace() {
    this.kept = this.node.scrollTop;
  }

  /** Show again what was in view. */
  restorePlace() {
    this.node.scrollTop = this.kept;
  }

  /** Draw the rows again, as when marks have changed. */
  redraw() {
    this.#draw();
  }

  get #height() {
    return this.narrow.matches ? 84 : 52;
  }

  /** How high the rows in view are together: the titles stay above them. */
  get #room() {
    return this.node.clientHeight - this.head.offsetHeight;
  }

  get #scale() {
    return Math.max(1, (this.total * this.#height) / TALLEST);
  }

  #top() {
    return Math.max(0, Math.floor((this.node.scrollTop * this.#scale) / this.#height));
  }

  #resized() {
    this.node.setAttribute("aria-rowcount", String(this.total + 1));
    this.space.style.height = `${(this.total * this.#height) / this.#scale}px`;
    this.#draw();
  }

  #soon() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.#draw();
    });
  }

  #draw() {
    const height = this.#height;
    const top = this.#top();
    const count = Math.ceil(this.#room / height);
    const from = Math.max(0, top - OVERSCAN);
    const to = Math.min(this.total, top + count + OVERSCAN);
    const drift = this.node.scrollTop - top * height - ((this.node.scrollTop * this.#scale) % height);
    const shift = this.#scale > 1 ? drift : 0;
    const rows = [];
    for (let index = from; index < to; index += 1) rows.push(this.#row(index, index * height + shift));
    fill(this.space, rows);
    this.#want(Math.floor(from / PAGE), Math.floor(Math.max(from, to - 1) / PAGE));
    const active = this.active >= from && this.active < to ? `${this.prefix}-${this.active}` : "";
    if (active) this.node.setAttribute("aria-activedescendant", active);
    else this.node.removeAttribute("aria-activedescendant");
  }

  /** @param {number} index @param {number} y */
  #row(index, y) {
    const row = this.#at(index);
    const cells = row ? this.options.cells(row, index) : [el("span", { role: "gridcell" }, "…")];
    const node = el(
      "div.virtual-row",
      { role: "row", id: `${this.prefix}-${index}`, "aria-rowindex": index + 2, data: { index } },
      cells,
    );
    node.classList.toggle("is-active", index === this.active);
    node.style.transform = `translateY(${y}px)`;
    return node;
  }

  /** @param {number} index */
  #at(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  /** Ask for pages, unless the list is scrolled past them at once. @param {number} first @param {number} last */
  #want(first, last) {
    const missing = [];
    for (let page = first; page <= last; page += 1) if (this.total > 0 && !this.pages.has(page)) missing.push(page);
    clearTimeout(this.timer);
    if (missing.length === 0) return;
    const { version } = this;
    this.timer = window.setTimeout(() => {
      for (const page of missing) this.#load(page, version);
    }, WAIT_MS);
  }

  /** @param {number} page @param {number} version */
  async #load(page, version) {
    if (this.pages.has(page)) return;
    this.pages.set(page, null);
    try {
      const answer = await this.options.load(page * PAGE, PAGE);
      if (version !== this.version) return;
      this.pages.set(page, answer.rows);
      if (answer.total === this.total) return this.#draw();
      this.total = answer.total;
      this.#resized();
    } catch (error) {
      if (version !== this.version) return;
      this.pages.delete(page);
      this.options.failed(error);
    }
  }

  /** @param {number} index */
  #activate(index) {
    this.active = Math.min(Math.max(index, 0), this.total - 1);
    const height = this.#height;
    const top = (this.active * height) / this.#scale;
    const bottom = top + height;
    const { scrollTop } = this.node;
    if (top < scrollTop) this.node.scrollTop = top;
    else if (bottom > scrollTop + this.#room) this.node.scrollTop = bottom - this.#room;
    this.#draw();
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.target !== this.node || event.ctrlKey || event.metaKey || event.altKey || this.total === 0) return;
    const screen = Math.max(1, Math.floor(this.#room / this.#height) - 1);
    const from = this.active < 0 ? this.#top() - 1 : this.active;
    const moves = {
      ArrowDown: from + 1,
      ArrowUp: from - 1,
      PageDown: from + screen,
      PageUp: from - screen,
      Home: 0,
      End: this.total - 1,
    };
    const row = this.active < 0 ? undefined : this.#at(this.active);
    if (event.key in moves) this.#activate(moves[/** @type {keyof typeof moves} */ (event.key)]);
    else if (event.key === "Enter" && row) this.options.open(row);
    else if (event.key === " " && row) this.options.mark(row);
    else return;
    event.preventDefault();
  }

  /** @param {MouseEvent} event */
  #click(event) {
    const target = /** @type {Element} */ (event.target);
    if (target.closest("a, input, button, label")) return;
    const row = target.closest(".virtual-row");
    const found = row instanceof HTMLElement ? this.#at(Number(row.dataset.index)) : null;
    if (found && !String(getSelection())) this.options.open(found);
  }
}
