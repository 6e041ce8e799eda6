/**
 * The environment's inner state, folded away until it is opened.
 */

import { api } from "./api.js";
import { el, fill, icon } from "./element.js";
import { Tree } from "./tree.js";

/** The state, asked for while it is looked at. */
export class StatePanel {
  constructor() {
    this.tree = new Tree();
    this.body = el("div");
    const again = el("button.small", { type: "button", on: { click: () => this.#load() } }, icon("reset"), "Refresh");
    const hint = el("p.hint", {}, "For debugging; agents do not see it. ", again);
    this.node = el("details.fold.state", {}, el("summary", {}, "State"), hint, this.body);
    this.node.addEventListener("toggle", () => this.refresh());
  }

  /** Ask again, if it is looked at. */
  refresh() {
    if (this.node.open && !this.node.hidden) this.#load();
  }

  async #load() {
    try {
      this.tree.show(await api.state());
      fill(this.body, this.tree.node);
    } catch (error) {
      fill(this.body, el("p.hint", {}, /** @type {Error} */ (error).message));
    }
  }
}
