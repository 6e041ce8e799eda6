/**
 * Tabs: one panel at a time, chosen by mouse, by arrow keys, or by the address's fragment.
 */

import { el, fill } from "./element.js";

/**
 * @typedef {object} Tab
 * @property {string} id
 * @property {string} title
 * @property {HTMLElement} node
 * @property {(isShown: boolean) => void} [onShow]
 */

/** A row of tabs and the panel of the chosen one. */
export class Tabs {
  /**
   * @param {Tab[]} tabs
   * @param {string} first - The tab to begin with.
   * @param {object} [options]
   * @param {string} [options.label]
   * @param {string} [options.prefix] - Of ids, for tabs inside of a tab.
   * @param {(id: string) => void} [options.onSelect] - Called when the visitor chooses a tab.
   */
  constructor(tabs, first, { label = "Views", prefix = "", onSelect } = {}) {
    this.tabs = tabs;
    this.onSelect = onSelect;
    this.buttons = tabs.map((tab) =>
      el(
        "button.tab",
        {
          type: "button",
          role: "tab",
          id: `${prefix}tab-${tab.id}`,
          "aria-controls": `${prefix}panel-${tab.id}`,
          on: { click: () => this.#choose(tab.id) },
        },
        tab.title,
      ),
    );
    this.panels = tabs.map((tab) =>
      el(
        "div.panel",
        {
          role: "tabpanel",
          id: `${prefix}panel-${tab.id}`,
          "aria-labelledby": `${prefix}tab-${tab.id}`,
          hidden: true,
        },
        tab.node,
      ),
    );
    const list = el(
      "div.tabs",
      {
        role: "tablist",
        "aria-label": label,
        on: { keydown: (/** @type {KeyboardEvent} */ event) => this.#key(event) },
      },
      this.buttons,
    );
    this.list = prefix ? list : el("nav", { "aria-label": label }, list);
    this.body = prefix ? el("div.panels") : el("main.panels", { id: "content", tabindex: -1 });
    fill(this.body, this.panels);
    /** @type {string | null} */
    this.chosen = null;
    this.select(tabs.some((tab) => tab.id === first) ? first : tabs[0].id);
  }

  /** Whether there is such a tab. @param {string} id */
  has(id) {
    return this.tabs.some((tab) => tab.id === id);
  }

  /** @param {string} id */
  select(id) {
    if (id === this.chosen) return;
    this.tabs.forEach((tab, index) => {
      const isChosen = tab.id === id;
      const button = this.buttons[index];
      button.setAttribute("aria-selected", String(isChosen));
      button.setAttribute("tabindex", isChosen ? "0" : "-1");
      this.panels[index].hidden = !isChosen;
      if (tab.id === this.chosen || isChosen) tab.onShow?.(isChosen);
    });
    this.chosen = id;
  }

  /** @param {string} id */
  #choose(id) {
    this.select(id);
    this.onSelect?.(id);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const at = this.tabs.findIndex((tab) => tab.id === this.chosen);
    const last = this.tabs.length - 1;
    const next = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[
      event.key
    ];
    if (next === undefined) return;
    event.preventDefault();
    this.#choose(this.tabs[next].id);
    this.buttons[next].focus();
  }
}
