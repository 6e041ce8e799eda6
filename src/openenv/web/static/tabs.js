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
  /** @param {Tab[]} tabs @param {string} first - The tab to begin with. */
  constructor(tabs, first) {
    this.tabs = tabs;
    this.buttons = tabs.map((tab) =>
      el(
        "button.tab",
        {
          type: "button",
          role: "tab",
          id: `tab-${tab.id}`,
          "aria-controls": `panel-${tab.id}`,
          on: { click: () => this.select(tab.id) },
        },
        tab.title,
      ),
    );
    this.panels = tabs.map((tab) =>
      el(
        "div.panel",
        {
          role: "tabpanel",
          id: `panel-${tab.id}`,
          "aria-labelledby": `tab-${tab.id}`,
          hidden: true,
        },
        tab.node,
      ),
    );
    this.list = el(
      "div.tabs",
      {
        role: "tablist",
        "aria-label": "Views",
        on: { keydown: (/** @type {KeyboardEvent} */ event) => this.#key(event) },
      },
      this.buttons,
    );
    this.body = el("main.panels", { id: "content", tabindex: -1 });
    fill(this.body, this.panels);
    /** @type {string | null} */
    this.chosen = null;
    this.select(tabs.some((tab) => tab.id === first) ? first : tabs[0].id);
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

  /** @param {KeyboardEvent} event */
  #key(event) {
    const at = this.tabs.findIndex((tab) => tab.id === this.chosen);
    const last = this.tabs.length - 1;
    const next = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[
      event.key
    ];
    if (next === undefined) return;
    event.preventDefault();
    this.select(this.tabs[next].id);
    this.buttons[next].focus();
  }
}
