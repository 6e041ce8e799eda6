/**
 * The outline of a transcript: every turn with its number, tools and reward; the one in view is marked.
 */

import { el, fill } from "./element.js";
import { firstLine, visible } from "./texts.js";
import { formatReward } from "./values.js";

const READ = "-80px 0px -60% 0px"; // below the bar of tools, in the upper part of the window
const WIDE = "(min-width: 1000px)";

/** A list of turns beside the transcript, above it on narrow screens. */
export class Outline {
  /**
   * @param {object} options
   * @param {(number: number) => void} options.goTo
   * @param {Record<string, number>} options.rewards - By turn.
   */
  constructor({ goTo, rewards }) {
    this.goTo = goTo;
    this.rewards = rewards;
    /** @type {Map<number, HTMLElement>} */
    this.buttons = new Map();
    /** @type {Set<Element>} */
    this.inView = new Set();
    this.list = el("ol");
    this.node = el("details.outline", {}, el("summary", {}, "Outline"), this.list);
    this.node.open = matchMedia(WIDE).matches;
    this.watcher = new IntersectionObserver((entries) => this.#seen(entries), { rootMargin: READ });
    this.current = 0;
  }

  /** @param {any[]} turns */
  show(turns) {
    this.buttons = new Map(turns.map((turn) => [turn.number, this.#button(turn)]));
    fill(
      this.list,
      [...this.buttons.values()].map((button) => el("li", {}, button)),
    );
  }

  /** Note when a turn comes into view. @param {HTMLElement} node */
  watch(node) {
    this.watcher.observe(node);
  }

  /** Forget a turn's element. @param {HTMLElement} node */
  drop(node) {
    this.watcher.unobserve(node);
    this.inView.delete(node);
  }

  /** @param {any} turn */
  #button(turn) {
    const calls = turn.reply.parts.filter((/** @type {any} */ part) => part.kind === "call");
    const said = turn.reply.parts.find((/** @type {any} */ part) => part.kind === "text" && part.text?.trim());
    const label = calls.length
      ? calls.map((/** @type {any} */ part) => part.name || "tool").join(", ")
      : firstLine(said?.text ?? "", 60);
    const reward = this.rewards[turn.number];
    return el(
      "button",
      {
        type: "button",
        data: { branch: turn.branch },
        class: turn.error ? "has-error" : null,
        on: { click: () => this.goTo(turn.number) },
      },
      el("span.number", {}, turn.number),
      el(calls.length ? "span.what.mono" : "span.what", {}, visible(label || turn.branch)),
      Boolean(reward) && el("span.outline-reward", {}, formatReward(reward)),
    );
  }

  /** @param {IntersectionObserverEntry[]} entries */
  #seen(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this.inView.add(target);
      else this.inView.delete(target);
    }
    const numbers = [...this.inView].map((node) => Number(/** @type {HTMLElement} */ (node).dataset.turn));
    if (numbers.length) this.#mark(Math.min(...numbers));
  }

  /** @param {number} number */
  #mark(number) {
    if (number === this.current) return;
    this.buttons.get(this.current)?.removeAttribute("aria-current");
    this.current = number;
    const button = this.buttons.get(number);
    button?.setAttribute("aria-current", "true");
    // Only the outline may scroll, never the page.
    if (button && this.node.open && matchMedia(WIDE).matches) {
      const { offsetTop, offsetHeight } = button;
      const { scrollTop, clientHeight } = this.list;
      if (offsetTop < scrollTop || offsetTop + offsetHeight > scrollTop + clientHeight) {
        this.list.scrollTop = offsetTop - clientHeight / 2;
      }
    }
  }
}
