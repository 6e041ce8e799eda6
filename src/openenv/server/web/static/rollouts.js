/**
 * Rollouts: the list, one of them, or two side by side, as the address says.
 */

import { addRolloutStyles } from "./badges.js";
import { el, fill } from "./element.js";
import { isOfRollouts, listAddress, placeOf, rolloutAddress } from "./rollout_address.js";
import { RolloutList } from "./rollout_list.js";
import { RolloutPage } from "./rollout_page.js";
import { RolloutPair } from "./rollout_pair.js";

/** Everything about rollouts; a tab of the page, or a page of its own. */
export class Rollouts {
  /** @param {object} options @param {(error: any) => boolean} options.refused - Takes errors that concern the visitor. */
  constructor({ refused }) {
    this.refused = refused;
    this.list = new RolloutList({ refused });
    /** @type {RolloutPage | RolloutPair | null} */
    this.page = null;
    this.isShown = false;
    this.last = "";
    this.node = el("div.rollouts");
    addEventListener("hashchange", (event) => this.#moved(event));
    addRolloutStyles();
  }

  /** @param {boolean} isShown */
  show(isShown) {
    if (isShown === this.isShown) return;
    this.isShown = isShown;
    if (isShown) {
      if (!isOfRollouts(location.hash)) history.replaceState(null, "", this.last || listAddress(new URLSearchParams()));
      this.#route();
    } else {
      this.#leave();
    }
  }

  /** @param {HashChangeEvent} event */
  #moved(event) {
    if (!this.isShown || !isOfRollouts(location.hash)) return;
    const from = placeOf(new URL(event.oldURL).hash);
    if (from.name === "list" && history.state === null) history.replaceState({ isFromList: true }, "");
    this.#route();
  }

  #route() {
    const place = placeOf(location.hash);
    this.last = location.hash;
    if (place.name === "one" && this.page instanceof RolloutPage && this.page.id === place.id) {
      const isSame = this.page.verdict === (place.query.get("verdict") ?? "");
      if (isSame) return this.page.select(place.part || "transcript");
    }
    this.#leave();
    if (place.name === "list") {
      fill(this.node, this.list.node);
      this.list.show(true, place.query);
      return;
    }
    const { refused } = this;
    this.page =
      place.name === "pair"
        ? new RolloutPair(place.ids, { refused })
        : new RolloutPage(place.id, {
            part: place.part,
            verdict: place.query.get("verdict") ?? "",
            refused,
            list: this.list.filters.request,
            goTo: (address) => this.#goTo(address),
          });
    fill(this.node, this.page.node);
    scrollTo(0, 0);
  }

  /** Show another rollout in place of this one, so that the way back leads to the list. @param {string} address */
  #goTo(address) {
    history.replaceState(history.state, "", address);
    this.#route();
  }

  #leave() {
    this.list.show(false);
    this.page?.close();
    this.page = null;
  }
}

/** The view of one rollout, inside of something else. @param {string} id */
export function rolloutView(id) {
  addRolloutStyles();
  const page = new RolloutPage(id, { part: "", verdict: "", refused: () => false });
  return el("div.rollouts", {}, el("p", {}, el("a", { href: rolloutAddress(id) }, "Open it in Rollouts")), page.node);
}
